// AMX tiles of up to 16 rows of 64 bytes. The compiler's own loads of them do not tell it that they read memory, and GCC
// 12 takes a configuration to be 8 bytes: it may then drop the stores before them. So the instructions are written out.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__)
namespace OUTRIDER_ISA {

// The shapes of a thread's tiles, for C += A B of up to 32 rows and 32 columns: 0 to 3 hold C, 4 and 5 the rows of A, up
// to 16 in each, 6 and 7 the columns of B.
class TileShapes {
 public:
  ~TileShapes() {
    if (rows_) asm volatile("tilerelease");
  }

  void set(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(rows < 16 ? rows : 16);
    config.rows[2] = config.rows[3] = config.rows[5] = uint8_t(rows > 16 ? rows - 16 : 1);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }

 private:
  int rows_ = 0;
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
// C (rows, 16 floats) += A (rows, 32 numbers) B (16 pairs of rows, 16 columns).
template <int C, int A, int B>
INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace OUTRIDER_ISA
#endif
