// AMX tiles of up to 16 rows of 64 bytes. The compiler's own loads of them do not tell it that they read memory, and GCC
// 12 takes a configuration to be 8 bytes: it may then drop the stores before them. So the instructions are written out.
#pragma once

#include "vec.h"

#if defined(__AMX_BF16__)
namespace OUTRIDER_ISA {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

INLINE void tile_release() { asm volatile("tilerelease"); }

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
