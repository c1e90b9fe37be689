// AMX tiles of up to 16 rows of 64 bytes. The compiler's own loads of them do not tell it that they read memory, and GCC
// 12 takes a configuration to be 8 bytes: it may then drop the stores before them. So the instructions are written out.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__)
namespace OUTRIDER_ISA {

// Until it goes, subnormal numbers are zeros, as they are for tiles.
class NoSubnormals {
 public:
  NoSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~NoSubnormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

// The shapes of a thread's tiles, for C += A B of up to 32 rows and 32 columns: 0 to 3 hold C, 4 and 5 the rows of A, up
// to 16 in each, of up to 64 bytes, 6 and 7 the columns of B.
class TileShapes {
 public:
  ~TileShapes() {
    if (rows_) asm volatile("tilerelease");
  }

  void set(int rows, int bytes = 64) {
    if (rows == rows_ && bytes == bytes_) return;
    rows_ = rows, bytes_ = bytes;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(rows < 16 ? rows : 16);
    config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(rows > 16 ? rows - 16 : 1);
    config.row_bytes[4] = config.row_bytes[5] = uint16_t(bytes);
    config.rows[6] = config.rows[7] = uint8_t(bytes / 4);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }

 private:
  int rows_ = 0, bytes_ = 0;
};

template <int T>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
INLINE void tile_load(const void *from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
INLINE void tile_store(void *to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// C (rows, 16) += A (rows, n of 4 bytes) B (n, 16 of 4 bytes), which are two bfloat16 or four integers of 8 bits.
template <class X, int C, int A, int B>
INLINE void tile_multiply() {
  if constexpr (sizeof(X) == 1)
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  else
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Two tiles side by side and those that follow: where they begin, and how many bytes behind a tile's first line are its
// second, the other tile, and the next tile.
struct TilePairs {
  const void *at;
  size_t line, other, next;
};

// C += A B, or = if it is `fresh`, two by two tiles, `steps` times; without `lower` C has up to 16 rows, without `right`
// up to 16 columns. Before each step there is time for `meanwhile`.
template <class X, class M>
INLINE void tile_products(TilePairs a, bool lower, TilePairs b, bool right, int steps, void *c, size_t line, bool fresh,
                          M meanwhile) {
  uint8_t *upper_c = static_cast<uint8_t *>(c), *lower_c = upper_c + 16 * line;
  if (fresh) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  } else {
    tile_load<0>(upper_c, line);
    if (right) tile_load<1>(upper_c + 64, line);
    if (lower) tile_load<2>(lower_c, line);
    if (lower && right) tile_load<3>(lower_c + 64, line);
  }
  const uint8_t *x = static_cast<const uint8_t *>(a.at), *w = static_cast<const uint8_t *>(b.at);
  for (int i = 0; i < steps; i++, x += a.next, w += b.next) {
    meanwhile(i);
    tile_load<4>(x, a.line), tile_load<6>(w, b.line);
    tile_multiply<X, 0, 4, 6>();
    if (right) {
      tile_load<7>(w + b.other, b.line);
      tile_multiply<X, 1, 4, 7>();
    }
    if (!lower) continue;
    tile_load<5>(x + a.other, a.line);
    tile_multiply<X, 2, 5, 6>();
    if (right) tile_multiply<X, 3, 5, 7>();
  }
  tile_store<0>(upper_c, line);
  if (right) tile_store<1>(upper_c + 64, line);
  if (lower) tile_store<2>(lower_c, line);
  if (lower && right) tile_store<3>(lower_c + 64, line);
}

}  // namespace OUTRIDER_ISA
#endif
