// Products of integers: activations rounded to 8 bits times the codes of quantised weights. Sums of integers have no
// order, so whichever instruction makes them, and however rows share it, the bits are the same.
#pragma once

#include "linear.h"
#include "vec.h"

namespace OUTRIDER_ISA {

INLINE vi splat(int32_t x) { return x - vi{}; }

// Of each lane's four bytes: acc + the products of codes of `kSigned` 8 bits, or of 7 bits without a sign, and numbers
// from -127 to 127.
template <bool kSigned>
INLINE vi dot(vi acc, vi codes, vi x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, (__m256i)x);
#elif defined(__AVX2__)
  __m256i w = (__m256i)codes, n = (__m256i)x;
  if (kSigned) n = _mm256_sign_epi8(n, w), w = _mm256_abs_epi8(w);
  // Two products make at most 2 * 128 * 127, which 16 bits hold.
  return acc + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, n), _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)codes, (int8x16_t)x);
#else
  for (int shift = 24; shift >= 0; shift -= 8) acc += ((codes << shift) >> 24) * ((x << shift) >> 24);
  return acc;
#endif
}

// a * b + c, rounded once on every processor.
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX2__) || defined(__ARM_NEON)
  return fma(a, b, c);
#else
  for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// Each format gives `codes(w, v)`: of the four k at w, the weights of vector v plus kZero, in the order of kFour.
constexpr int kFour[4] = {0, 2, 1, 3};

struct Codes8 {
  using X = int8_t;
  static constexpr int kBytes = 32;  // of a panel for each k
  static constexpr bool kScaled = true;
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)  // whose instructions take codes without a sign
  static constexpr bool kSigned = false;
  static constexpr int kZero = 128;
  INLINE vi codes(const uint8_t *w, int v) { return load_as<vi>(w + 4 * v * W) ^ int32_t(0x80808080); }
#else
  static constexpr bool kSigned = true;
  static constexpr int kZero = 0;
  INLINE vi codes(const uint8_t *w, int v) { return load_as<vi>(w + 4 * v * W); }
#endif
};

template <int Zero>
struct Codes4 {
  using X = int8_t;
  static constexpr int kBytes = 16;
  static constexpr bool kScaled = true, kSigned = false;
  static constexpr int kZero = Zero;
  INLINE vi codes(const uint8_t *w, int v) { return (load_as<vi>(w + 4 * (v * W % 16)) >> 4 * (v * W / 16)) & 0x0f0f0f0f; }
};

struct Codes5 : Codes4<0> {
  static constexpr int kBytes = 20;
  INLINE vi codes(const uint8_t *w, int v) {
    const uint8_t *fifth = w + 64 + 4 * (v * W / 16);
    const uint32_t even = load_as<uint32_t>(fifth), odd = load_as<uint32_t>(fifth + 8);  // bytes
    const vi low = Codes4<0>::codes(w, v);
#if defined(__AVX512BW__)
    return low | (vi)_mm512_maskz_set1_epi16(even, 0x10) | (vi)_mm512_maskz_set1_epi16(odd, 0x1000);
#else
    vi place;
    for (int i = 0; i < W; i++) place[i] = 2 * (v * W % 16 + i);
    const vu e = (even - vu{}) >> (vu)place, o = (odd - vu{}) >> (vu)place;
    return low | (vi)((e & 1) << 4 | (o & 1) << 12 | (e & 2) << 19 | (o & 2) << 27);
#endif
  }
};

struct Codes6 : Codes4<32> {
  static constexpr int kBytes = 24;
  INLINE vi codes(const uint8_t *w, int v) {
    const int half = v * W / 16;
#if defined(__AVX512BW__)
    const vu bits = (vu)_mm512_cvtepu8_epi16(load_as<__m256i>(w + 64));
#else
    const vu both = __builtin_convertvector(load_as<vh>(w + 64 + 2 * (v * W % 16)), vu);
    const vu bits = (both & 0xff) | (both & 0xff00) << 8;
#endif
    return Codes4<32>::codes(w, v) | (vi)((bits << (4 - 2 * half) & 0x00300030) | (bits << (8 - 2 * half) & 0x30003000));
  }
};

// Rounds `count` numbers, whole vectors of them, to integers times the scale that is returned, and puts these from `to`
// on, each four in the order of kFour. What is not finite makes the scale so. `added` gets the integers' sum.
INLINE float round_group(const float *x, int count, int8_t *to, int32_t &added) {
  vi most = {};
  for (int k = 0; k < count; k += W) {
    const vi size = (vi)load(x + k) & 0x7fffffff;  // ordered like the numbers, NaN last
    most = size > most ? size : most;
  }
  const int32_t top = max(most);
  float largest;
  memcpy(&largest, &top, 4);
  added = 0;
  if (top >= 0x7f800000) {  // infinite, or NaN
    memset(to, 0, count);
    return largest;
  }
  const float scale = largest / 127, inverse = largest < 0x1p-100f ? 0 : 127 / largest;
  vi total = {};
  for (int k = 0; k < count; k += W) {
    const vi whole = (vi)(load(x + k) * inverse + 12582912.0f) - 0x4b400000;  // adding 1.5 * 2^23 rounds to an integer
    total += whole;
#if defined(__AVX512F__)
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)whole), order);
    memcpy(to + k, &bytes, sizeof bytes);
#elif defined(__AVX2__)
    const __m128i first = _mm256_castsi256_si128((__m256i)whole), second = _mm256_extracti128_si256((__m256i)whole, 1);
    const __m128i order = _mm_setr_epi8(0, 4, 2, 6, 8, 12, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i bytes = _mm_shuffle_epi8(_mm_packs_epi32(first, second), order);
    memcpy(to + k, &bytes, W);
#else
    for (int i = 0; i < W; i++) to[k + i] = int8_t(whole[i / 4 * 4 + kFour[i % 4]]);
#endif
  }
  added = sum(total);
  return scale;
}

}  // namespace OUTRIDER_ISA
