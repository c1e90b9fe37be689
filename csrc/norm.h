// RMSNorm of one row, shared by the kernels that begin with one.
#pragma once

#include "vec.h"

namespace OUTRIDER_ISA {

// 1 / sqrt(mean(x^2) + eps)
template <class A>
INLINE float rms_factor(const A *x, int width, float eps) {
  vf squares = {};
  for (int k = 0; k < width; k += W) {
    const vf v = load_n(x + k, width - k);
    squares = fma(v, v, squares);
  }
  return 1 / __builtin_sqrtf(sum(squares) / float(width) + eps);
}

// Up to W normed values from place k on, not yet rounded.
template <class A>
INLINE vf normed(const A *x, const A *weight, int k, int width, float factor) {
  return load_n(x + k, width - k) * factor * load_n(weight + k, width - k);
}

}  // namespace OUTRIDER_ISA
