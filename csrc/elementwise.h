// What lies between the products, row by row.
#pragma once

#include <cstdint>

struct ElementwiseKernels {
  // y (rows, width) = x / sqrt(mean(x^2) + eps) * weight; all float, or all bfloat16 (`half`).
  void (*rms_norm)(const void *x, int rows, int width, const void *weight, float eps, void *y, bool half, int threads);
  // Turns the first `heads` heads of each row of qkv (rows, stride), in place, by cos and sin (rows, dim), the sine
  // signed for the half-split layout. If q_norm is not null, the first `queries` heads are normed by it before and
  // the others by k_norm, each (dim).
  void (*rope)(void *qkv, int rows, int stride, int heads, int queries, int dim, const void *cos, const void *sin,
               const void *q_norm, const void *k_norm, float eps, bool half, int threads);
  // best[r] = where row r of x (rows, width) is largest, the first place of several; -1 if that is infinite, or one is NaN.
  void (*argmax)(const float *x, int rows, int width, int *best, int threads);
  // shaped = (x - most) / temperature
  void (*shape)(const float *x, int n, float most, float temperature, float *shaped);
  // weights = e^x, to 1e-6 or so, but 0 where x < floor; returns their sum.
  double (*weigh)(const float *x, int n, float floor, float *weights);
  // Where x >= floor, ascending; returns how many places.
  int (*above)(const float *x, int n, float floor, int32_t *places);
  // (u - 1) / weight, to 1e-6 or so, where u is Law 1's variate of each place under this key; -inf where weight is 0.
  void (*race)(const float *weights, int n, uint64_t key, float *ratios);
};

#ifdef OUTRIDER_ISA
namespace OUTRIDER_ISA {
extern const ElementwiseKernels elementwise_kernels;
}
#endif
