// Vectors of W floats in the instruction set that a file is compiled for, as GCC and Clang vector types: `a + b * c`
// works on them and never contracts (-ffp-contract=off); `fma` fuses where the processor can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "type.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace OUTRIDER_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * W), may_alias));
typedef int8_t vb __attribute__((vector_size(W), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vf splat(float x) { return x - vf{}; }  // not plus: -0 + 0 is 0, and would be computed

template <class V, class T>
INLINE V load_as(const T *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE vf load(const float *p) { return load_as<vf>(p); }
INLINE vf load(const bf16 *p) {
#if defined(__AVX512F__)  // GCC 12 converts it in two halves
  return (vf)((vi)_mm512_cvtepu16_epi32(load_as<__m256i>(p)) << 16);
#elif defined(__AVX2__)
  return (vf)((vi)_mm256_cvtepu16_epi32(load_as<__m128i>(p)) << 16);
#else
  return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
#endif
}
INLINE vf load(const int8_t *p) {
#if defined(__AVX512F__)  // GCC 12 converts byte by byte
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(p)));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
  return __builtin_convertvector(load_as<vb>(p), vf);
#endif
}
INLINE vf load(const f16 *p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
  const vu u = __builtin_convertvector(load_as<vh>(p), vu), magnitude = u & 0x7fff;
  const vf scaled = (vf)(magnitude << 13) * 0x1p112f;  // the exponent's bias; subnormal numbers become normal
  const vu infinite = (vu)(magnitude >= 0x7c00) & 0x7f800000;
  return (vf)((vu)scaled | infinite | (u & 0x8000) << 16);
#endif
}
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

INLINE void store(float *p, vf x) { memcpy(p, &x, sizeof x); }
// Rounds to nearest even; a NaN stays one.
INLINE void store(bf16 *p, vf x) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh((__m512)x);
  memcpy(p, &h, sizeof h);
#else
  const vu u = (vu)x;
  const vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
  const vu nan = (vu)(x != x);
  const vh h = __builtin_convertvector((rounded & ~nan) | (quiet & nan), vh);
  memcpy(p, &h, sizeof h);
#endif
}
INLINE void store(f16 *p, vf x) {
#if defined(__AVX512F__)
  const __m256i h = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  const __m128i h = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vu magnitude = (vu)x & 0x7fffffff, normal = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const vu subnormal = (vu)((vf)magnitude + 0.5f) - 0x3f000000;  // the sum has the unit of half's least number
  const vu large = (vu)(magnitude >= 0x47800000), small = (vu)(magnitude < 0x38800000), nan = (vu)(x != x);
  const vu finite = (subnormal & small) | (normal & ~small), quiet = 0x7e00 | (magnitude >> 13 & 0x1ff);
  const vu size = (quiet & nan) | (0x7c00 & large & ~nan) | (finite & ~large);
  const vh h = __builtin_convertvector(size | ((vu)x >> 16 & 0x8000), vh);
#endif
  memcpy(p, &h, sizeof h);
}

// The first n of W lanes, the others 0; n may be more than W.
template <class T>
INLINE vf load_n(const T *p, int n) {
  if (n >= W) return load(p);
  T part[W] = {};
  memcpy(part, p, sizeof(T) * n);
  return load(part);
}

template <class T>
INLINE void store_n(T *p, vf x, int n) {
  if (n >= W) return store(p, x);
  T part[W];
  store(part, x);
  memcpy(p, part, sizeof(T) * n);
}

// a * b + c
INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// b where they cannot be compared
#if defined(__AVX512F__)
INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE vf max(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf min(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE vf min(vf a, vf b) { return a < b ? a : b; }
#endif

// Sum and maximum of all lanes, by halving.
INLINE float sum(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float lane[W];
  store(lane, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
}
INLINE float max(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#endif
  float lane[W];
  store(lane, x);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
  return lane[0];
}
INLINE int32_t sum(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#elif defined(__AVX2__)
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#endif
  int32_t total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
}
INLINE int32_t max(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#endif
  int32_t most = x[0];
  for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
  return most;
}

// e^x to 1 ulp or so; 0 below -87.3, infinite above 88.3; NaN for NaN. Cody and Waite's reduction,
// then the polynomial of Cephes' expf.
INLINE vf exp(vf x) {
  const vf clamped = min(max(x, splat(-87.33654f)), splat(88.37626f));
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf n = fma(clamped, splat(1.44269504f), magic) - magic;
  vf r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  const vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  const vf y = p * (vf)power;
  return x < -87.33654f ? splat(0.0f) : x > 88.37626f ? splat(__builtin_inff()) : x != x ? x : y;
}

INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }

}  // namespace OUTRIDER_ISA
