// What lies between the products, row by row.
#pragma once

#include <cstdint>

#include "type.h"

// What becomes of a gate and its up: silu(gate) * up; gelu(gate) * up, by the tanh formula; or, `clamped`, of a gate of at
// most `limit` and an up within it, gate / (1 + e^(-alpha gate)) * (up + 1).
struct Gate {
  enum Kind : int { kSilu, kGelu, kClamped } kind;
  float alpha, limit;
};

struct ElementwiseKernels {
  // y (rows, width) = x / sqrt(mean(x^2) + eps) * weight; all of one type.
  void (*rms_norm)(const void *x, int rows, int width, const void *weight, float eps, void *y, Type type, int threads);
  // Turns the first `heads` heads of each row of qkv (rows, stride), in place, by cos and sin (rows, dim), the sine
  // signed for the half-split layout. If q_norm is not null, the first `queries` heads are normed by it before and
  // the others by k_norm, each (dim).
  void (*rope)(void *qkv, int rows, int stride, int heads, int queries, int dim, const void *cos, const void *sin,
               const void *q_norm, const void *k_norm, float eps, Type type, int threads);
  // y (rows, width) = the gates of x (rows, 2 * width), which come first, and its ups. All of one type.
  void (*gate)(const void *x, int rows, int width, Gate gate, void *y, Type type, int threads);
  // x (count) += factor * y.
  void (*add)(void *x, const void *y, int64_t count, float factor, Type type, int threads);
  // y (rows, width) = residual, which may be null, + the sum over j, in order, of weights[r][j] times row at[r][j] of parts
  // (all, width) float; `each` of them.
  void (*combine)(const float *parts, const int *at, const float *weights, int rows, int each, int width,
                  const void *residual, void *y, Type type, int threads);
  // best[r] = where row r of x (rows, width) is largest, the first place of several; -1 if that is infinite, or one is NaN.
  void (*argmax)(const float *x, int rows, int width, int *best, int threads);
  // shaped = (x - most) / temperature
  void (*shape)(const float *x, int n, float most, float temperature, float *shaped);
  // weights = e^x, to 1e-6 or so, but 0 where x < floor; returns their sum.
  double (*weigh)(const float *x, int n, float floor, float *weights);
  // Where x >= floor, ascending; returns how many places.
  int (*above)(const float *x, int n, float floor, int32_t *places);
  // ratios = (u - 1) * e^((x - most) * factor), to 1e-6 or so, where u is Law 1's variate of each place under this key;
  // -inf where x < floor. Returns the largest.
  float (*race)(const float *x, int n, float most, float factor, float floor, uint64_t key, float *ratios);
};

#ifdef OUTRIDER_ISA
namespace OUTRIDER_ISA {
extern const ElementwiseKernels elementwise_kernels;
}
#endif
