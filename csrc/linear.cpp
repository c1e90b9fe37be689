// Linear products that are the same for a row whatever rows ride along: for each output the sum over k runs from the
// first k to the last with one instruction, or with another that makes the same bits, and rows and threads only divide the
// outputs among themselves.
#include "linear.h"

#include <climits>
#include <type_traits>

#include "integers.h"
#include "norm.h"
#include "pool.h"
#include "scratch.h"
#include "tiles.h"

namespace OUTRIDER_ISA {
namespace {

constexpr int NV = kPanel / W;  // vectors of a panel
constexpr int kStep = 4;        // k that one step of a product takes
constexpr int kChunkBytes = 1 << 16, kUnpackedBytes = 1 << 14, kTaskBytes = 1 << 19;
constexpr int kTileRows = 32;  // that are taken at once where products are made of tiles
constexpr int kNear = 4096;  // bytes that few rows fetch ahead, beyond the groups that they take at once

// How bfloat16 activations enter a product (the others enter as floats), and how many rows it takes at most at once.
// For more than kDirect rows weights are unpacked once for all, through memory, which pays where unpacking takes long.
#if defined(__AVX512BF16__)
using Half = bf16;
constexpr int kRows = 12, kDirect = INT_MAX;
#else
using Half = float;
constexpr int kRows = W == 16 ? 12 : W == 8 ? 4 : 2, kDirect = 4 * kRows;
#endif

// Whether products are of integers, with rounded rows.
template <class F>
constexpr bool kRounded = std::is_same_v<typename F::X, int8_t>;

// Whether, for more than kRows rows, the codes of some k stay in registers while all rows pass over them, and the rows'
// sums wait in memory: where registers are few and codes have no sign.
#if defined(__AVX2__) && !defined(__AVX512F__)
template <class F>
constexpr bool kCodesStay = kRounded<F> && (F::kBytes < Codes8::kBytes || !Codes8::kSigned);
#else
template <class F>
constexpr bool kCodesStay = false;
#endif

// How many rows of a format are taken at once, at most: integers leave more registers free.
template <class F>
constexpr int kRowsOf = kCodesStay<F> ? 32 : W == 8 && kRounded<F> ? 6 : kRows;

// How many are where there are so many. The totals of more than ten rows find no registers, which costs more than to
// unpack weights once more (not those of 8 bits, which take long); many rows are best taken by eight.
template <class F>
constexpr int at_once(int rows) {
  constexpr int kAlone = F::kBytes < 32 ? 10 : kRows;
  return W == 16 && F::kScaled && rows > kAlone ? 8 : kRowsOf<F>;
}

// Whether a product of so many rows takes half of a panel's vectors: where the sums of all would not fit 16 registers.
template <class F>
constexpr bool halved(int rows) { return W == 8 && rows > 2 && !kRounded<F>; }

// Each format gives `weights(w, a, v, even, odd)`: of the four k at w, the weights of vector v at k = 2 a and 2 a + 1.
template <class T>
struct Plain {  // one k after the other, widened as they are read
  using X = float;
  static constexpr int kBytes = kPanel * sizeof(T);  // of a panel for each k
  static constexpr bool kScaled = false;
  INLINE void weights(const uint8_t *w, int a, int v, vf &even, vf &odd) {
    const T *at = reinterpret_cast<const T *>(w) + 2 * a * kPanel + v * W;
    even = load(at), odd = load(at + kPanel);
  }
};
using F32 = Plain<float>;
using F16 = Plain<f16>;

struct BF16 {
  using X = Half;
  static constexpr int kBytes = 64;  // of a panel for each k
  static constexpr bool kScaled = false;
  INLINE void weights(const uint8_t *w, int a, int v, vf &even, vf &odd) {
    const vu u = load_as<vu>(w + 4 * (a * kPanel + v * W));
    even = (vf)(u << 16), odd = (vf)(u & 0xffff0000u);
  }
#if defined(__AVX512BF16__)
  INLINE __m512bh pairs(const uint8_t *w, int a, int v) { return (__m512bh)_mm512_loadu_si512(w + 64 * (2 * a + v)); }
#endif
};

struct BF16Scaled : BF16 {  // quantised values, unpacked
  static constexpr bool kScaled = true;
};

struct I8 {
  using X = Half;
  static constexpr int kBytes = 32;  // of a panel for each k
  static constexpr bool kScaled = true;
  INLINE void weights(const uint8_t *w, int a, int v, vf &even, vf &odd) {
    const int8_t *b = reinterpret_cast<const int8_t *>(w) + 64 * a + v * W / 16 * 32 + v * W % 16;
    even = load(b), odd = load(b + 16);
  }
#if defined(__AVX512BF16__)
  INLINE __m512bh pairs(const uint8_t *w, int a, int v) {  // exact: bfloat16 holds all integers up to 256
    vf even, odd;
    weights(w, a, v, even, odd);
    return (__m512bh)_mm512_mask_mov_epi16(_mm512_srli_epi32((__m512i)even, 16), 0xaaaaaaaa, (__m512i)odd);
  }
#endif
};

// The integers from `first` on, `count` of them again and again, as bfloat16, which holds them exactly.
template <int N>
struct Table {
  alignas(64) bf16 at[N];
  constexpr Table(int first, int count) : at() {
    for (int i = 0; i < N; i++) {
      const int n = first + i % count, m = n < 0 ? -n : n;
      int power = 0;
      while (m >> (power + 1)) power++;
      at[i] = m ? bf16((n < 0) << 15 | (127 + power) << 7 | (m << 7 >> power & 0x7f)) : 0;
    }
  }
};

// Weights of 4 bits, less `kZero`.
template <int kZero>
struct Nibbles {
  using X = Half;
  static constexpr int kBytes = 16;  // of a panel for each k
  static constexpr bool kScaled = true;
  INLINE void codes(const uint8_t *w, int a, int v, vu &even, vu &odd) {
    const vu u = load_as<vu>(w + 4 * (v * W % 16));
    const int shift = 4 * (2 * a + v * W / 16);
    even = (u >> shift) & 0xf, odd = (u >> (16 + shift)) & 0xf;
  }
  // They are left where they lie, as multiples of a power of two, by which `prepare` has divided the rows: no bit changes
  // (but of numbers below 2^-102, in all rows alike), and a shift of each vector would take half as long as its product.
  static constexpr int kPlaces[kStep] = {0, 16, 8, 24};
  INLINE void weights(const uint8_t *w, int a, int v, vf &even, vf &odd) {
    const vu u = load_as<vu>(w + 4 * (v * W % 16)) >> (v * W / 16 * 4);
    const int e = kPlaces[2 * a], o = kPlaces[2 * a + 1];
    even = __builtin_convertvector((vi)(u & (0xfu << e)) - (kZero << e), vf);
    odd = __builtin_convertvector((vi)(u & (0xfu << o)) - (kZero << o), vf);
  }
#if defined(__AVX512BF16__)
  INLINE __m512i words(const uint8_t *w, int a, int v) { return _mm512_srli_epi16(_mm512_loadu_si512(w), 4 * (2 * a + v)); }
  // The lookup takes the low 5 bits of each word: a nibble and a bit that the table, written twice, ignores.
  INLINE __m512bh pairs(const uint8_t *w, int a, int v) {
    static constexpr Table<32> kTable(-kZero, 16);
    return (__m512bh)_mm512_permutexvar_epi16(words(w, a, v), _mm512_load_si512(kTable.at));
  }
#endif
};

using I4 = Nibbles<8>;
using U4 = Nibbles<0>;

struct U5 : Nibbles<0> {
  static constexpr int kBytes = 20;
  INLINE void weights(const uint8_t *w, int a, int v, vf &even, vf &odd) {
    struct Bits {
      uint32_t even[16];
      constexpr Bits() : even() {
        for (int i = 0; i < 16; i++) even[i] = 1u << 2 * i;
      }
    };
    static constexpr Bits kBits;
    vu e, o;
    codes(w, a, v, e, o);
    const uint32_t upper = load_as<uint32_t>(w + 64 + 4 * (2 * a + v * W / 16));
    const vu bit = load_as<vu>(kBits.even + v * W % 16);
    e |= (vu)((bit & upper) != 0) & 16, o |= (vu)((bit & (upper >> 1)) != 0) & 16;
    even = __builtin_convertvector((vi)e, vf), odd = __builtin_convertvector((vi)o, vf);
  }
#if defined(__AVX512BF16__)
  INLINE __m512bh pairs(const uint8_t *w, int a, int v) {
    static constexpr Table<32> kTable(0, 32);
    const __m512i upper = _mm512_maskz_set1_epi16(load_as<uint32_t>(w + 64 + 4 * (2 * a + v)), 16);
    const __m512i code = _mm512_ternarylogic_epi32(words(w, a, v), _mm512_set1_epi16(0xf), upper, 0xea);  // a & b | c
    return (__m512bh)_mm512_permutexvar_epi16(code, _mm512_load_si512(kTable.at));
  }
#endif
};

struct I6 : Nibbles<32> {
  static constexpr int kBytes = 24;
  INLINE void weights(const uint8_t *w, int a, int v, vf &even, vf &odd) {
    vu e, o;
    codes(w, a, v, e, o);
    const vu upper = __builtin_convertvector(load_as<vh>(w + 64 + 2 * (v * W % 16)), vu) >> (2 * (2 * a + v * W / 16));
    e |= (upper & 3) << 4, o |= (upper >> 8 & 3) << 4;
    even = __builtin_convertvector((vi)e - 32, vf), odd = __builtin_convertvector((vi)o - 32, vf);
  }
#if defined(__AVX512BF16__)
  INLINE __m512bh pairs(const uint8_t *w, int a, int v) {
    static constexpr Table<64> kTable(-32, 64);
    const int j = 2 * a + v;
    const __m512i bytes = _mm512_cvtepu8_epi16(load_as<__m256i>(w + 64));
    const __m512i upper = j < 2 ? _mm512_slli_epi16(bytes, 4 - 2 * j) : _mm512_srli_epi16(bytes, 2 * j - 4);
    const __m512i code = _mm512_ternarylogic_epi32(words(w, a, v), upper, _mm512_set1_epi16(0xf), 0xe4);  // c ? a : b
    return (__m512bh)_mm512_permutex2var_epi16(_mm512_load_si512(kTable.at), code, _mm512_load_si512(kTable.at + 32));
  }
#endif
};

struct FP4 : Nibbles<0> {
  INLINE vf number(vu code) {
    const vu m = code & 7, twice = ((2 | (m & 1)) << (m >> 1) >> 1) - ((vu)(m == 0) & 1);
    return (vf)((vu)__builtin_convertvector((vi)twice, vf) | (code & 8) << 28);
  }
  INLINE void weights(const uint8_t *w, int a, int v, vf &even, vf &odd) {
    vu e, o;
    codes(w, a, v, e, o);
    even = number(e), odd = number(o);
  }
#if defined(__AVX512BF16__)
  INLINE __m512bh pairs(const uint8_t *w, int a, int v) {
    static constexpr struct Signed {
      alignas(64) bf16 at[32];
      constexpr Signed() : at() {
        const Table<13> whole(0, 13);
        for (int i = 0; i < 32; i++) at[i] = bf16(whole.at[kE2M1[i & 7]] | (i & 8) << 12);
      }
    } kTable;
    return (__m512bh)_mm512_permutexvar_epi16(words(w, a, v), _mm512_load_si512(kTable.at));
  }
#endif
};

struct FP8 {
  using X = Half;
  static constexpr int kBytes = 32;  // of a panel for each k
  static constexpr bool kScaled = true;
  INLINE vf number(vu code) {
    const vu m = code & 0x7f, normal = (m << 20) + (120u << 23);
    const vf small = __builtin_convertvector((vi)m, vf) * 0x1p-9f;
    return (vf)((m < 8 ? (vu)small : normal) | (code & 0x80) << 24);
  }
  INLINE void weights(const uint8_t *w, int a, int v, vf &even, vf &odd) {
    const vu u = __builtin_convertvector(load_as<vh>(w + 2 * (a * kPanel + v * W)), vu);
    even = number(u & 0xff), odd = number(u >> 8);
  }
#if defined(__AVX512BF16__)
  INLINE __m512bh pairs(const uint8_t *w, int a, int v) {  // exact, too
    static constexpr struct Small {
      alignas(64) bf16 at[32];
      constexpr Small() : at() {
        const Table<8> whole(0, 8);
        for (int i = 0; i < 32; i++) at[i] = bf16(whole.at[i % 8] ? whole.at[i % 8] - (9 << 7) : 0);
      }
    } kTable;
    const __m512i code = _mm512_cvtepu8_epi16(load_as<__m256i>(w + 32 * (2 * a + v)));
    const __m512i m = _mm512_slli_epi16(_mm512_and_si512(code, _mm512_set1_epi16(0x7f)), 4);
    const __m512i normal = _mm512_add_epi16(m, _mm512_set1_epi16(120 << 7));
    // The lookup takes the low 5 bits, which for a small number are its mantissa.
    const __m512i number = _mm512_mask_permutexvar_epi16(normal, _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78)),
                                                         code, _mm512_load_si512(kTable.at));
    const __m512i sign = _mm512_slli_epi16(code, 8);
    return (__m512bh)_mm512_ternarylogic_epi32(number, sign, _mm512_set1_epi16(short(0x8000)), 0xf8);  // a | b & c
  }
#endif
};

// R rows of x. Three rows share a pointer, lest a loop over many runs out of registers for them.
template <class X, int R>
struct Lines {
  const X *at[(R + 2) / 3];
  size_t ldx;
  INLINE Lines from(const X *x, size_t ldx) {
    Lines lines;
    for (int i = 0; i < (R + 2) / 3; i++) lines.at[i] = x + 3 * i * ldx;
    lines.ldx = ldx;
    return lines;
  }
  const X *operator[](int r) const { return at[r / 3] + r % 3 * ldx; }
  void advance(int k) {
    for (auto &x : at) x += k;
  }
};

// acc += the products of the kStep k that begin at k of x: R rows of x with N vectors of a panel of w from First on.
template <class F, int First, int R, int N>
INLINE void step(const Lines<typename F::X, R> &x, int k, const uint8_t *w, vf (&acc)[R][N]) {
#pragma GCC unroll 2
  for (int a = 0; a < kStep / 2; a++, k += 2) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<typename F::X, bf16>) {
      const __m512bh low = F::pairs(w, a, 0), high = F::pairs(w, a, 1);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const __m512bh both = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(x[r] + k));
        acc[r][0] = (vf)_mm512_dpbf16_ps((__m512)acc[r][0], low, both);
        acc[r][1] = (vf)_mm512_dpbf16_ps((__m512)acc[r][1], high, both);
      }
      continue;
    }
#endif
    if constexpr (N == NV) {
      for (int v = 0; v < N; v++) {
        vf even, odd;
        F::weights(w, a, v, even, odd);
        for (int r = 0; r < R; r++) {
          acc[r][v] = fma(splat(float(x[r][k])), even, acc[r][v]);
          acc[r][v] = fma(splat(float(x[r][k + 1])), odd, acc[r][v]);
        }
      }
    } else {  // one k after the other, and all products with a number of a row at once: few registers wait meanwhile
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        vf weights[N];
#pragma GCC unroll 8
        for (int v = 0; v < N; v++) {
          vf both[2];
          F::weights(w, a, First + v, both[0], both[1]);
          weights[v] = both[odd];
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const vf each = splat(float(x[r][k + odd]));
#pragma GCC unroll 8
          for (int v = 0; v < N; v++) acc[r][v] = fma(each, weights[v], acc[r][v]);
        }
      }
    }
  }
}

// The factors that begin at `each` and `coarse`, in numbers.
INLINE vf factor(const Factors &factors, size_t each, size_t coarse) {
  if (factors.kind == Factors::kHalf) return load(static_cast<const f16 *>(factors.each) + each);
  if (factors.kind == Factors::kBfloat) return load(static_cast<const bf16 *>(factors.each) + each);
  if (factors.kind == Factors::kFloat) return load(static_cast<const float *>(factors.each) + each);
  return load(factors.coarse + coarse) * load(static_cast<const int8_t *>(factors.each) + each);  // exact
}

// The scale and, if there are any, the offset of a panel's vector v for one of so many groups.
INLINE void factors_of(const Weights &w, int panel, int group, int groups, int v, vf &scale, vf &offset) {
  const size_t each = (size_t(panel) * groups + group) * kPanel + v * W;
  const size_t coarse = (size_t(panel) * w.supers() + group * w.group / kSuper) * kPanel + v * W;
  scale = factor(w.scales, each, coarse);
  if (!w.offsets.each) return;
  if (w.offsets.kind == Factors::kZeros) offset = -(scale * load(static_cast<const int8_t *>(w.offsets.each) + each));
  else offset = factor(w.offsets, each, coarse);
}

// total[r] += the sums of a group, scaled, and its offset times sums[r].
template <int First, int R, int N>
INLINE void scale(const Weights &w, const float *sums, int panel, int group, int groups, const vf (&acc)[R][N],
                  vf (&total)[R][N]) {
#pragma GCC unroll 8
  for (int v = 0; v < N; v++) {
    vf scale, offset;
    factors_of(w, panel, group, groups, First + v, scale, offset);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      total[r][v] = fma(scale, acc[r][v], total[r][v]);
      if (sums) total[r][v] = fma(offset, splat(sums[r]), total[r][v]);
    }
  }
}

// The rows of activations as the products take them: padded with zeros to whole steps, normed, widened or rounded.
template <class X>
struct Rows {
  const X *x;
  size_t stride;
  int count;
  const float *sums;  // (groups, rows): of x over each group of k; null unless the weights have offsets
  // Of rounded rows, (groups, rows): what their integers are multiplied by, and where sums begin: these integers times
  // the codes' zero, taken away.
  const float *scales = nullptr;
  const int32_t *starts = nullptr;
  // For tiles: 32 rows after the other, and of them so many k of each row side by side, those of a tile.
  int tile = 0;

  int deep() const { return std::is_same_v<X, bf16> ? kDepth : tile; }  // the same, where possible as a constant
  size_t at(int row, int k) const {
    if (!tile) return row * stride + k;
    const int first = row / kTileRows * kTileRows, together = count - first < kTileRows ? count - first : kTileRows;
    return first * stride + size_t(k / deep() * together + row - first) * deep() + k % deep();
  }
  const float *sums_of(int group, int row) const { return sums ? sums + size_t(group) * count + row : nullptr; }
};

// A panel is taken in chunks of k that stay in the cache while all rows pass over them. Sums stay in registers meanwhile
// and rest in memory between two chunks, which changes no bit of them.
struct Chunk {
  int panel, begin, end;  // k from begin to end
  const uint8_t *data;    // its weights
  const uint8_t *ahead;   // what to fetch meanwhile, `pace` bytes in each step
  int64_t pace;
};

template <int R, int N>
INLINE void take(vf (&total)[R][N], const float (*out)[kPanel], int first = 0) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) total[r][v] = load(out[r] + (first + v) * W);
}

template <int R, int N>
INLINE void leave(const vf (&total)[R][N], float (*out)[kPanel], int first = 0) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) store(out[r] + (first + v) * W, total[r][v]);
}

#if defined(__AMX_BF16__)
// acc += the products of kDepth k of a row, with the bits that tdpbf16ps makes of them: even and odd k summed apart, each
// from zero.
template <class F>
INLINE void run_as_tile(const bf16 *x, const uint8_t *data, vf (&acc)[NV]) {
  vf even[NV] = {}, odd[NV] = {};
#pragma GCC unroll 2
  for (int k = 0; k < kDepth; k += kStep)
#pragma GCC unroll 2
    for (int a = 0; a < kStep / 2; a++) {
      const vu pair = load_as<uint32_t>(x + k + 2 * a) - vu{};
      const vf first = (vf)(pair << 16), second = (vf)(pair & 0xffff0000u);
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) {
        vf low, high;  // the weights of an even k and of the next
        if constexpr (std::is_same_v<F, I8>) {
          F::weights(data + k * F::kBytes, a, v, low, high);
        } else {
          const vu both = (vu)F::pairs(data + k * F::kBytes, a, v);
          low = (vf)(both << 16), high = (vf)(both & 0xffff0000u);
        }
        even[v] = fma(first, low, even[v]);
        odd[v] = fma(second, high, odd[v]);
      }
    }
#pragma GCC unroll 2
  for (int v = 0; v < NV; v++) acc[v] += even[v] + odd[v];
}
#endif

// acc[g] += the products of K k from the first one of each of G groups of `size`.
template <class F, int First, int K, int G, int R, int N>
INLINE void run(const Lines<typename F::X, R> &x, const uint8_t *data, int size, vf (&acc)[G][R][N]) {
#if defined(__AMX_BF16__)
  if constexpr (F::kScaled && R == 1 && K == kDepth) {  // more rows are made of tiles
#pragma GCC unroll 2
    for (int g = 0; g < G; g++) run_as_tile<F>(x[0] + g * size, data + size_t(g * size) * F::kBytes, acc[g][0]);
    return;
  }
#endif
  const auto at = [&](int k) {
#pragma GCC unroll 2
    for (int g = 0; g < G; g++) step<F, First>(x, g * size + k, data + size_t(g * size + k) * F::kBytes, acc[g]);
  };
#pragma GCC unroll 2
  for (int k = 0; k < K; k += kStep) at(k);
}

// out[r] += the chunk's products for R rows, of the panel's vectors from First on, all or half of them. The chunk has
// whole groups, or one that is short.
template <class F, int R, int First = 0>
__attribute__((noinline)) void product(const Weights &w, const Rows<typename F::X> &rows, int row, const Chunk &chunk, float (*out)[kPanel]) {
  auto x = Lines<typename F::X, R>::from(rows.x + row * rows.stride + chunk.begin, rows.stride);
  const uint8_t *data = chunk.data, *ahead = chunk.ahead;
  const int64_t pace = chunk.pace;
  const auto advance = [&](int by) { x.advance(by), data += size_t(by) * F::kBytes; };
  const auto fetch = [&](int k) {
    for (const uint8_t *end = ahead + k / kStep * pace; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
  };
  constexpr int N = halved<F>(R) ? NV / 2 : NV;
  vf total[1][R][N];
  take(total[0], out, First);
  if constexpr (!F::kScaled) {
    for (int k = chunk.begin; k < chunk.end; k += 2 * kStep, advance(2 * kStep)) {
      fetch(2 * kStep);
      run<F, First, 2 * kStep>(x, data, kDepth, total);
    }
    return leave(total[0], out, First);
  }
#if defined(__AMX_BF16__)
  const NoSubnormals as_for_tiles;
#endif
  // Few rows take more groups at once, lest they wait for their own sums.
  constexpr int kTogether = R * N <= 4 ? 2 : 1;
  const int groups = w.groups(), size = w.group;
  if (chunk.ahead == chunk.data + kNear) ahead += kTogether * size * F::kBytes;
  int k = chunk.begin, group = k / size;
  const float *sums = rows.sums_of(group, row);
  const size_t next = sums ? rows.count : 0;
  for (; k + kTogether * size <= chunk.end; k += kTogether * size, group += kTogether, sums += kTogether * next) {
    vf acc[kTogether][R][N];
#pragma GCC unroll 2
    for (int g = 0; g < kTogether; g++)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
        for (int v = 0; v < N; v++) acc[g][r][v] = vf{};
    if (size < kDepth) {
      fetch(kTogether * size);
      run<F, First, kDepth / 2>(x, data, size, acc), advance(size);
    } else {
      for (int done = 0; done < size; done += kDepth, advance(kDepth)) {
        fetch(kTogether * kDepth);
        run<F, First, kDepth>(x, data, size, acc);
      }
    }
    advance((kTogether - 1) * size);
#pragma GCC unroll 2
    for (int g = 0; g < kTogether; g++)
      scale<First>(w, sums + g * next, chunk.panel, group + g, groups, acc[g], total[0]);
  }
  while (k < chunk.end) {
    const int length = chunk.end - k < size ? chunk.end - k : size, part = length < kDepth ? length : kDepth;
    vf acc[1][R][N] = {};
    fetch(length);
    for (int done = 0; done < length; done += part, advance(part)) {
      if (part == kDepth) run<F, First, kDepth>(x, data, size, acc);
      else run<F, First, kDepth / 2>(x, data, size, acc);
    }
    scale<First>(w, sums, chunk.panel, group++, groups, acc[0], total[0]);
    k += length, sums += next;
  }
  leave(total[0], out, First);
}

// out[r] += the chunk's products for R rounded rows: sums of integers from group to group, then two roundings.
template <class F, int R>
__attribute__((noinline)) void integer_product(const Weights &w, const Rows<int8_t> &rows, int row, const Chunk &chunk,
                                               float (*out)[kPanel]) {
  constexpr int kAcross = NV < 2 ? NV : 2, kPart = 16;  // vectors of sums at once; k between two fetches
  [[maybe_unused]] constexpr int kSweeps = W < 8 ? 1 : NV / kAcross;  // written out, unless the sums would not fit the registers anyway
  const int groups = w.groups(), size = w.group;
  const uint8_t *data = chunk.data, *ahead = chunk.ahead;
  auto x = Lines<int8_t, R>::from(rows.x + row * rows.stride + chunk.begin, rows.stride);
  vf total[R][NV];
  take(total, out);
  for (int k = chunk.begin, group = k / size; k < chunk.end; k += size, group++) {
    const int length = chunk.end - k < size ? chunk.end - k : size;
    const float *sums = rows.sums_of(group, row), *scales = rows.scales + size_t(group) * rows.count + row;
    const int32_t *starts = rows.starts + size_t(group) * rows.count + row;
#pragma GCC unroll kSweeps
    for (int v = 0; v < NV; v += kAcross) {
      vi acc[R][kAcross];
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const vi start = F::kZero ? splat(starts[r]) : vi{};
#pragma GCC unroll 2
        for (int u = 0; u < kAcross; u++) acc[r][u] = start;
      }
      const uint8_t *from = data;
      for (int part = 0; part < length; part += kPart, from += kPart * F::kBytes) {
        if (v == 0)
          for (const uint8_t *end = ahead + kPart / kStep * chunk.pace; ahead < end; ahead += 64)
            __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
        for (int at = 0; at < kPart; at += kStep) {
          vi codes[kAcross];
#pragma GCC unroll 2
          for (int u = 0; u < kAcross; u++) codes[u] = F::codes(from + at * F::kBytes, v + u);
#pragma GCC unroll 16
          for (int r = 0; r < R; r++) {
            const vi four = splat(load_as<int32_t>(x[r] + part + at));
#pragma GCC unroll 2
            for (int u = 0; u < kAcross; u++) acc[r][u] = dot<F::kSigned>(acc[r][u], codes[u], four);
          }
        }
      }
#pragma GCC unroll 2
      for (int u = 0; u < kAcross; u++) {
        vf scale, offset;
        factors_of(w, chunk.panel, group, groups, v + u, scale, offset);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          const vf whole = __builtin_convertvector(acc[r][u], vf);  // exactly: it is below 2^24
          total[r][v + u] = fused(scale, whole * splat(scales[r]), total[r][v + u]);
          if (sums) total[r][v + u] = fused(offset, splat(sums[r]), total[r][v + u]);
        }
      }
    }
    x.advance(length), data += size_t(length) * F::kBytes;
  }
  leave(total, out);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same for n rows, whose sums wait in memory: registers hold the codes of some k for two vectors.
template <class F>
void many_integers(const Weights &w, const Rows<int8_t> &rows, int row, int n, const Chunk &chunk, float (*out)[kPanel]) {
  constexpr int kPart = 16, kHeld = kPart / kStep, kNarrow = F::kBytes > 20 ? 2 : 4;  // products whose sum fits 16 bits
  const int groups = w.groups(), size = w.group;
  const size_t stride = rows.stride;
  const uint8_t *data = chunk.data, *ahead = chunk.ahead;
  const int8_t *x = rows.x + row * stride + chunk.begin;
  vi sums[kRowsOf<F>][NV];
  for (int k = chunk.begin, group = k / size; k < chunk.end; k += size, group++) {
    const int length = chunk.end - k < size ? chunk.end - k : size;
    const float *added = rows.sums_of(group, row), *scales = rows.scales + size_t(group) * rows.count + row;
    const int32_t *starts = rows.starts + size_t(group) * rows.count + row;
    for (int r = 0; r < n; r++)
      for (int v = 0; v < NV; v++) sums[r][v] = F::kZero ? splat(starts[r]) : vi{};
    for (int part = 0; part < length; part += kPart, x += kPart, data += kPart * F::kBytes) {
      for (const uint8_t *end = ahead + kHeld * chunk.pace; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 2
      for (int v = 0; v < NV / 2; v++) {
        vi codes[kHeld][2];
#pragma GCC unroll 4
        for (int i = 0; i < kHeld; i++)
#pragma GCC unroll 2
          for (int u = 0; u < 2; u++) codes[i][u] = F::codes(data + i * kStep * F::kBytes, v + u * NV / 2);
        const int8_t *from = x;
        for (int r = 0; r < n; r++, from += stride)
#pragma GCC unroll 2
          for (int i = 0; i < kHeld; i += kNarrow) {
#if defined(__AVXVNNI__)
#pragma GCC unroll 4
            for (int j = i; j < i + kNarrow; j++) {
              const vi four = splat(load_as<int32_t>(from + j * kStep));
#pragma GCC unroll 2
              for (int u = 0; u < 2; u++) {
                vi &sum = sums[r][v + u * NV / 2];
                sum = dot<false>(sum, codes[j][u], four);
              }
            }
#else
            __m256i narrow[2] = {};
#pragma GCC unroll 4
            for (int j = i; j < i + kNarrow; j++) {
              const __m256i four = (__m256i)splat(load_as<int32_t>(from + j * kStep));
#pragma GCC unroll 2
              for (int u = 0; u < 2; u++)
                narrow[u] = _mm256_add_epi16(narrow[u], _mm256_maddubs_epi16((__m256i)codes[j][u], four));
            }
#pragma GCC unroll 2
            for (int u = 0; u < 2; u++)
              sums[r][v + u * NV / 2] += (vi)_mm256_madd_epi16(narrow[u], _mm256_set1_epi16(1));
#endif
          }
      }
    }
    for (int v = 0; v < NV; v++) {
      vf scale, offset;
      factors_of(w, chunk.panel, group, groups, v, scale, offset);
      for (int r = 0; r < n; r++) {
        float *to = out[r] + v * W;
        const vf whole = __builtin_convertvector(sums[r][v], vf);  // exactly: it is below 2^24
        vf total = fused(scale, whole * splat(scales[r]), load(to));
        if (added) total = fused(offset, splat(added[r]), total);
        store(to, total);
      }
    }
  }
}
#endif

// The same for any number of rows, in even blocks. `ahead`: what will be wanted next, and how many bytes of it.
template <class F>
void chunk_rows(const Weights &w, const Rows<typename F::X> &rows, int n, Chunk &chunk, const uint8_t *ahead,
                int64_t bytes, float (*out)[kPanel]) {
  const int most = at_once<F>(n), blocks = (n + most - 1) / most, size = (n + blocks - 1) / blocks;
  // Each product fetches its share of that, in whole lines.
  const int products = blocks * (halved<F>(size) ? 2 : 1);
  const int64_t share = ahead ? (bytes + 64 * products - 1) / (64 * products) * 64 : 0;
  const int64_t steps = (chunk.end - chunk.begin) / kStep;
  int64_t fetched = 0;
  const auto begin = [&] {
    chunk.pace = ahead && fetched < bytes ? (share / steps + 63) / 64 * 64 : 0;
    chunk.ahead = ahead + fetched;
    fetched += share;
  };
  for (int row = 0; row < n; row += size) {
    begin();
    const int count = n - row < size ? n - row : size;
    float(*to)[kPanel] = out + row;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (kCodesStay<F>)
      if (count > kRows) {
        many_integers<F>(w, rows, row, count, chunk, to);
        continue;
      }
#endif
    switch (count) {
#define ROWS(R) \
  case R:                                                                                       \
    if constexpr (R > at_once<F>(R)) __builtin_unreachable();                                   \
    else if constexpr (kRounded<F>) integer_product<F, R>(w, rows, row, chunk, to);             \
    else {                                                                                      \
      product<F, R>(w, rows, row, chunk, to);                                                   \
      if constexpr (halved<F>(R)) begin(), product<F, R, NV / 2>(w, rows, row, chunk, to);      \
    }                                                                                           \
    break;
      ROWS(1) ROWS(2)
#if defined(__AVX2__)
      ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#endif
#if defined(__AVX512F__)
      ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
    }
  }
}

#if defined(__AMX_BF16__)
// How many k a tile of rows holds, 0 if products are not made of tiles. One row of quantised weights, and some rows of
// integers, get the same bits from vectors, which need not unpack weights through memory.
int tile_of(const Weights &w, int rows) {
  if (w.rounded) return rows <= kRows ? 0 : w.group < 64 ? w.group : 64;
  return w.format == kBF16 || (w.format != kF32 && w.format != kF16 && w.group >= kDepth && rows > 1) ? kDepth : 0;
}
#else
int tile_of(const Weights &, int) { return 0; }
#endif

struct Result {
  void *y;
  int stride;  // between rows, of the residual too
  bool y_float;
  const void *residual;
};

// Bias, gate, residual and rounding of one row of one panel.
template <class A>
INLINE void finish(const Weights &w, const Result &result, const float *out, int row, int panel) {
  const A *bias = static_cast<const A *>(w.bias), *residual = static_cast<const A *>(result.residual);
  const int width = w.width(), size = w.gated ? kPanel / 2 : kPanel;
  for (int i = 0, at = panel * size; i < size && at < width; i += W, at += W) {
    const int n = width - at;
    const size_t to = size_t(row) * result.stride + at;
    vf y = load(out + i);
    if (bias) y += load_n(bias + at, n);
    if (w.gated) {
      vf up = load(out + size + i);
      if (bias) up += load_n(bias + width + at, n);
      y = silu(y) * up;
    }
    if (residual) y += load_n(residual + to, n);
    if (result.y_float)
      store_n(static_cast<float *>(result.y) + to, y, n);
    else
      store_n(static_cast<A *>(result.y) + to, y, n);
  }
}

// Up to W numbers of a row from place k on, normed if there is a norm.
template <class A>
INLINE vf entered(const A *x, const A *norm, int k, int inputs, float factor) {
  if (!norm) return load_n(x + k, inputs - k);
  A rounded[W];
  store(rounded, normed(x, norm, k, inputs, factor));
  return load(rounded);
}

// The rows rounded to integers, group by group, for codes that are weights plus `zero`.
Rows<int8_t> prepare_rounded(int zero, const Weights &w, const bf16 *x, int rows, const bf16 *norm, float eps, int threads) {
  const int inputs = w.inputs, depth = w.padded(), groups = w.groups(), tile = tile_of(w, rows);
  const size_t stride = tile ? size_t(depth + tile - 1) / tile * tile : depth;
  int8_t *to = static_cast<int8_t *>(scratch(0, rows * stride));
  float *scales = static_cast<float *>(scratch(1, 3 * sizeof(float) * rows * groups)), *sums = scales + size_t(rows) * groups;
  int32_t *starts = reinterpret_cast<int32_t *>(sums + size_t(rows) * groups);
  const int part = tile ? tile : w.group < kDepth ? w.group : kDepth;
  const Rows<int8_t> out{to, stride, rows, w.offsets.each ? sums : nullptr, scales, starts, tile};
  pool::parallel(rows, size_t(rows) * depth > 65536 ? threads : 1, [&](int r) {
    const bf16 *from = x + size_t(r) * inputs;
    const float factor = norm ? rms_factor(from, inputs, eps) : 1;
    float *plain = static_cast<float *>(scratch(4, sizeof(float) * depth));
    memset(plain + inputs / W * W, 0, sizeof(float) * (depth - inputs / W * W));
    for (int k = 0; k < inputs; k += W) {
      const vf v = entered(from, norm, k, inputs, factor);
      if (!w.place) {
        store(plain + k, v);
        continue;
      }
      for (int j = 0; j < W && k + j < inputs; j++) plain[w.place[k + j]] = v[j];
    }
    for (int g = 0; g < groups; g++) {
      const int start = g * w.group, count = depth - start < w.group ? depth - start : w.group;
      const size_t at = size_t(g) * rows + r;
      int32_t whole;
      int8_t numbers[128] = {};  // zeros, which add nothing, behind a short group
      scales[at] = round_group(plain + start, count, numbers, whole);
      for (int k = 0; k < count; k += part) memcpy(to + out.at(r, start + k), numbers + k, part);
      sums[at] = scales[at] * float(whole);
      starts[at] = -zero * whole;
    }
  });
  return out;
}

template <class X, class A>
Rows<X> prepare(const Weights &w, const A *x, int rows, const A *norm, float eps, int threads) {
  const int inputs = w.inputs, depth = w.padded();
  const int tile = tile_of(w, rows);
  const bool sum_up = w.offsets.each;
  const bool copy = norm || w.place || inputs != depth || !std::is_same_v<X, A> || (tile && rows > 1);
  const int groups = sum_up ? w.groups() : 0;
  X *to = copy ? static_cast<X *>(scratch(0, sizeof(X) * rows * depth)) : nullptr;
  float *sums = sum_up ? static_cast<float *>(scratch(1, sizeof(float) * rows * groups)) : nullptr;
  const Rows<X> out{copy ? to : reinterpret_cast<const X *>(x), size_t(depth), rows, sums, nullptr, nullptr, tile};
  if (!copy && !sum_up) return out;
  pool::parallel(rows, size_t(rows) * depth > 65536 ? threads : 1, [&](int r) {
    const A *from = x + size_t(r) * inputs;
    const float factor = norm ? rms_factor(from, inputs, eps) : 1;
    for (int k = 0; copy && k < depth; k += W) {
      const vf v = k < inputs ? entered(from, norm, k, inputs, factor) : vf{};
      if (!w.place || k >= inputs) {
        store(to + out.at(r, k), v);
        continue;
      }
      X lane[W];
      store(lane, v);
      for (int j = 0; j < W; j++) to[out.at(r, k + j < inputs ? w.place[k + j] : k + j)] = lane[j];
    }
    for (int g = 0; g < groups; g++) {
      const int start = g * w.group, end = start + w.group < depth ? start + w.group : depth;
      vf total = {};
      for (int k = start; k < end; k += W) total += load(out.x + out.at(r, k));
      sums[size_t(g) * rows + r] = sum(total);
    }
    if constexpr (std::is_same_v<X, float>)
      if (w.format == kI4 || w.format == kU4) {
        vf parts;
        for (int k = 0; k < W; k++) parts[k] = 1.0f / float(1 << U4::kPlaces[k % kStep]);
        for (float *own = to + out.at(r, 0), *end = own + depth; own < end; own += W) store(own, load(own) * parts);
      }
  });
  return out;
}

// Quantised weights of a chunk as bfloat16, exactly: for many rows it is done once.
template <class F>
void unpack(const Chunk &chunk, uint8_t *to) {
  const uint8_t *data = chunk.data;
  for (int k = chunk.begin; k < chunk.end; k += kStep, data += kStep * F::kBytes) {
    __builtin_prefetch(data + kNear, 0, 2);
    for (int a = 0; a < kStep / 2; a++)
      for (int v = 0; v < NV; v++, to += 4 * W) {
        vf even, odd;
        F::weights(data, a, v, even, odd);
        const vu both = ((vu)even >> 16) | ((vu)odd & 0xffff0000u);
        memcpy(to, &both, sizeof both);
      }
  }
}

#if defined(__AMX_BF16__)
constexpr int kBlockRows = 512;  // rows that share a chunk of k and their sums of some panels, which the second-level cache holds
constexpr int kSpread = 4;       // groups whose sums are made before they are scaled
constexpr int kFar = 1 << 13;    // bytes that are fetched ahead

// Weights as tiles take them, bfloat16 or integers, exactly: some k of a panel, of each `tile` k the first half of the
// outputs before the second. bfloat16 stays in the first-level cache; integers take longer chunks, as it costs more to
// fetch their sums once more than to fetch them from the second.
template <class X>
struct Unpacked {
  static constexpr int kLine = 16 * sizeof(X);               // bytes of a k in half of the outputs
  static constexpr int kDeep = sizeof(X) == 1 ? 2048 : 256;  // k that there is room for
  const int tile;
  uint8_t *data = static_cast<uint8_t *>(scratch(3, 2 * kDeep * kLine));

  // Unpacks kDepth k from k on, which lie at `from`.
  template <class F>
  __attribute__((always_inline)) inline void fill(int k, const uint8_t *from) const {
    constexpr int kStepBytes = kStep * F::kBytes;
#pragma GCC unroll 8
    for (int step = 0; step < kDepth / kStep; step++, from += kStepBytes) {
      for (int i = 0; i < kStepBytes; i += 64) __builtin_prefetch(from + kFar + i, 0, 2);
#pragma GCC unroll 2
      for (int a = 0; a < kStep * kLine / 64; a++) {
        const int at = k % kDeep + step * kStep + a * 64 / kLine;
        uint8_t *line = data + (at + (at & -tile)) * kLine;
#pragma GCC unroll 2
        for (int v = 0; v < NV; v++, line += tile * kLine) {
          __m512i weights;
          if constexpr (sizeof(X) == 1)
            weights = _mm512_sub_epi8((__m512i)F::codes(from, v), _mm512_set1_epi8(char(F::kZero)));
          else
            weights = (__m512i)F::pairs(from, a, v);
          _mm512_store_si512(line, weights);
        }
      }
    }
  }

  // c += the products of `count` rows, from x on, with these weights from k on, or = if it is `fresh`.
  template <class M>
  __attribute__((always_inline)) inline void multiply(const X *x, int count, int k, int steps, float (*c)[kPanel],
                                                      bool fresh, M meanwhile) const {
    const size_t line = tile * sizeof(X), half = tile * kLine;
    const TilePairs a{x, line, 16 * line, count * line}, b{data + k % kDeep * 2 * kLine, 64, half, 2 * half};
    tile_products<X>(a, count > 16, b, true, steps, c, sizeof *c, fresh, meanwhile);
  }
};

// out += the sums of G groups from `group` on, scaled, and their offsets times the rows' sums.
template <int G, class X>
INLINE void scale_tiles(const Weights &w, const Rows<X> &rows, int row, int count, int panel, int group,
                        const float (*sums)[kTileRows][kPanel], float (*out)[kPanel]) {
  const int groups = w.groups();
  const size_t next = rows.count, first = group * next + row;
  const float *scales = rows.scales + first, *added = rows.sums ? rows.sums + first : nullptr;
  for (int v = 0; v < NV; v++) {
    vf scale[G], offset[G];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) factors_of(w, panel, group + g, groups, v, scale[g], offset[g]);
    for (int r = 0; r < count; r++) {
      vf total = load(out[r] + v * W);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) {
        const float *sum = sums[g][r] + v * W;
        if constexpr (sizeof(X) > 1) total = fma(scale[g], load(sum), total);
        else total = fma(scale[g], (vf)_mm512_cvtepi32_ps(_mm512_load_si512(sum)) * splat(scales[g * next + r]), total);
        if (added) total = fma(offset[g], splat(added[g * next + r]), total);
      }
      store(out[r] + v * W, total);
    }
  }
}

// out += the products of up to 32 rows from `row` on with unpacked weights, from k `begin` to `end`, group by group.
template <class X, class M>
INLINE void scaled_products(const Weights &w, const Rows<X> &rows, int row, int count, int panel,
                            const Unpacked<X> &weights, int begin, int end, float (*out)[kPanel], M meanwhile) {
  alignas(64) float sums[kSpread][kTileRows][kPanel];
  [[maybe_unused]] const std::conditional_t<sizeof(X) == 1, int, NoSubnormals> as_for_tiles{};
  const X *x = rows.x + rows.at(row, begin);
  const int size = w.group, tile = rows.deep(), steps = (size + tile - 1) / tile;
  int k = begin, group = k / size;
  const auto sum_up = [&](int steps, float(*to)[kPanel]) {
    weights.multiply(x, count, k, steps, to, true, meanwhile);
    x += steps * count * tile, k += size;
  };
  for (; k + kSpread * size <= end; group += kSpread) {
    for (int g = 0; g < kSpread; g++) sum_up(steps, sums[g]);
    scale_tiles<kSpread>(w, rows, row, count, panel, group, sums, out);
  }
  for (; k < end; group++) {
    sum_up(end - k < size ? (end - k + tile - 1) / tile : steps, sums[0]);
    scale_tiles<1>(w, rows, row, count, panel, group, sums, out);
  }
}

// The products of up to 32 rows with a panel of plain weights, which are read once.
void few_rows(const Rows<bf16> &rows, const uint8_t *data, int depth, float (*out)[kPanel]) {
  constexpr int kTileBytes = kDepth * BF16::kBytes;
  const TilePairs a{rows.x, 64, 16 * 64, size_t(rows.count * 64)}, b{data, 128, 64, kTileBytes};
  tile_products<bf16>(a, rows.count > 16, b, true, depth / kDepth, out, sizeof *out, true, [&](int step) {
    const uint8_t *ahead = data + size_t(step) * kTileBytes + kNear;
#pragma GCC unroll 32  // as a loop they come later: a sixth of the speed from memory
    for (int line = 0; line < kTileBytes / 64; line++) __builtin_prefetch(ahead + 64 * line, 0, 2);
  });
}

// The panels [first, last) for all rows.
template <class F>
void tile_panels(const Weights &w, const Rows<typename F::X> &rows, int first, int last, const Result &result) {
  using X = typename F::X;
  const int depth = w.padded(), n = rows.count, most = n < kBlockRows ? n : kBlockRows;
  // What all rows pass over stays unpacked for a chunk of k; what 32 rows need once, for some steps.
  const int chunk = n > kTileRows ? Unpacked<X>::kDeep : depth;
  auto sums = static_cast<float(*)[kPanel]>(scratch(2, sizeof(float) * (last - first) * most * kPanel));
  const Unpacked<X> weights{rows.deep()};
  TileShapes shapes;
  for (int row = 0; row < n; row += kBlockRows) {
    const int end = n - row < kBlockRows ? n : row + kBlockRows, count = end - row;
    const int blocks = (count + kTileRows - 1) / kTileRows;
    const int share = (rows.deep() * F::kBytes + 64 * blocks - 1) / (64 * blocks);  // lines of the next chunk for a step
    if (F::kScaled) memset(sums, 0, sizeof(float) * (last - first) * count * kPanel);
    for (int k = 0; k < depth; k += chunk)
      for (int panel = first; panel < last; panel++) {
        const uint8_t *data = static_cast<const uint8_t *>(w.data) + panel * w.panel_bytes();
        float(*out)[kPanel] = sums + (panel - first) * count;
        if constexpr (!F::kScaled)
          if (n <= kTileRows) {
            shapes.set(n);
            few_rows(rows, data, depth, out);
            continue;
          }
        const int until = k + chunk < depth ? k + chunk : depth;
        // Two steps ahead of the first rows' tiles, which other ports work on; a mere copy is faster at once.
        int filled = k, wanted = F::kScaled ? k + 2 * kDepth : until;
        const auto unpack = [&](int) {
          for (; filled < wanted && filled < until; filled += kDepth)
            weights.template fill<F>(filled, data + size_t(filled) * F::kBytes);
          wanted += rows.deep();
        };
        unpack(0);
        // What is unpacked next is asked for a few lines at each step, lest all of it be waited for.
        const bool around = panel + 1 == last;
        const int next = around ? until : k, more = depth - next < chunk ? depth - next : chunk;
        const uint8_t *ahead = static_cast<const uint8_t *>(w.data) + (around ? first : panel + 1) * w.panel_bytes();
        ahead += size_t(next) * F::kBytes;
        const uint8_t *ahead_end = ahead + size_t(more) * F::kBytes;
        const auto ask = [&](int) {
          for (int i = 0; i < share && ahead < ahead_end; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        };
        for (int r = row; r < end; r += kTileRows, out += kTileRows) {
          const int together = end - r < kTileRows ? end - r : kTileRows;
          shapes.set(together, rows.deep() * sizeof(X));
          const auto multiply = [&](auto meanwhile) {
            if constexpr (F::kScaled)
              scaled_products(w, rows, r, together, panel, weights, k, until, out, meanwhile);
            else
              weights.multiply(rows.x + rows.at(r, k), together, k, (until - k) / kDepth, out, k == 0, meanwhile);
          };
          if (F::kScaled && r == row) multiply(unpack);
          else multiply(ask);
        }
      }
    for (int r = row; r < end; r++)
      for (int panel = first; panel < last; panel++) finish<bf16>(w, result, sums[(panel - first) * count + r - row], r, panel);
  }
}
#endif

template <class F, class A>
void multiply(const Weights &w, const void *x, int n, const Result &result, const void *norm, float eps, int threads) {
  using X = typename F::X;
  const auto rows = [&] {
    const A *from = static_cast<const A *>(x), *scale = static_cast<const A *>(norm);
    if constexpr (kRounded<F>) return prepare_rounded(F::kZero, w, from, n, scale, eps, threads);
    else return prepare<X>(w, from, n, scale, eps, threads);
  }();
  const int depth = w.padded();
  const bool unpacked = F::kScaled && !kRounded<F> && n > kDirect;
  // Chunks of about one length: each fetches the next one while it is worked on.
  const int longest = unpacked ? kUnpackedBytes / BF16::kBytes : kChunkBytes / F::kBytes / kSuper * kSuper;
  const int chunks = (depth + longest - 1) / longest, length = ((depth - 1) / chunks / kSuper + 1) * kSuper;
  // Some panels make a task, since taking one costs time; still enough tasks that threads end together.
  const int all = w.panels(), most = all / (8 * threads), size = int(kTaskBytes / w.panel_bytes());
  const int together = size < most ? (size > 1 ? size : 1) : (most > 1 ? most : 1);
  const bool once = n <= at_once<F>(n) && !halved<F>(n);  // that a chunk is passed over
  const auto panel_rows = [&](int panel) {
    const uint8_t *data = static_cast<const uint8_t *>(w.data) + panel * w.panel_bytes();
    auto out = static_cast<float(*)[kPanel]>(scratch(2, sizeof(float) * n * kPanel));
    memset(out, 0, sizeof(float) * n * kPanel);
    for (int r = 0; result.y_float && r < n; r++)  // rows of logits lie far apart, and are long gone from the cache
      for (int at = 0; at < w.step(); at += 16)
        __builtin_prefetch(static_cast<float *>(result.y) + size_t(r) * result.stride + panel * w.step() + at, 1);
    for (int k = 0; k < depth; k += length) {
      const int end = k + length < depth ? k + length : depth;
      const uint8_t *here = data + size_t(k) * F::kBytes;
      Chunk chunk{panel, k, end, here, nullptr, 0};
      if constexpr (F::kScaled && !kRounded<F> && kDirect < INT_MAX) {
        if (unpacked) {
          uint8_t *plain = static_cast<uint8_t *>(scratch(3, kUnpackedBytes));
          unpack<F>(chunk, plain);
          chunk.data = plain;
          chunk_rows<BF16Scaled>(w, rows, n, chunk, nullptr, 0, out);
          continue;
        }
      }
      const int left = end < depth ? depth - end : depth, next = once ? end - k : left < length ? left : length;
      chunk_rows<F>(w, rows, n, chunk, here + (once ? kNear : size_t(end - k) * F::kBytes), int64_t(next) * F::kBytes, out);
    }
    for (int r = 0; r < n; r++) finish<A>(w, result, out[r], r, panel);
  };
  pool::parallel((all + together - 1) / together, threads, [&](int task) {
    const int first = task * together, last = first + together < all ? first + together : all;
#if defined(__AMX_BF16__)
    if constexpr (!std::is_same_v<X, float>)
      if (rows.tile) return tile_panels<F>(w, rows, first, last, result);
#endif
    for (int panel = first; panel < last; panel++) panel_rows(panel);
  });
}

void linear(const Weights &w, const void *x, int rows, void *y, int stride, bool y_float, const void *residual,
            const void *norm, float eps, int threads) {
  if (rows == 0) return;
  const Result result{y, stride, y_float, residual};
  if (w.rounded) {
    switch (w.format) {
      case kI8: return multiply<Codes8, bf16>(w, x, rows, result, norm, eps, threads);
      case kI4: return multiply<Codes4<8>, bf16>(w, x, rows, result, norm, eps, threads);
      case kU4: return multiply<Codes4<0>, bf16>(w, x, rows, result, norm, eps, threads);
      case kU5: return multiply<Codes5, bf16>(w, x, rows, result, norm, eps, threads);
      case kI6: return multiply<Codes6, bf16>(w, x, rows, result, norm, eps, threads);
      default: return;
    }
  }
  switch (w.format) {
    case kF32: return multiply<F32, float>(w, x, rows, result, norm, eps, threads);
    case kF16: return multiply<F16, f16>(w, x, rows, result, norm, eps, threads);
    case kBF16: return multiply<BF16, bf16>(w, x, rows, result, norm, eps, threads);
    case kI8: return multiply<I8, bf16>(w, x, rows, result, norm, eps, threads);
    case kI4: return multiply<I4, bf16>(w, x, rows, result, norm, eps, threads);
    case kU4: return multiply<U4, bf16>(w, x, rows, result, norm, eps, threads);
    case kU5: return multiply<U5, bf16>(w, x, rows, result, norm, eps, threads);
    case kI6: return multiply<I6, bf16>(w, x, rows, result, norm, eps, threads);
    case kFp4: return multiply<FP4, bf16>(w, x, rows, result, norm, eps, threads);
    case kFp8: return multiply<FP8, bf16>(w, x, rows, result, norm, eps, threads);
  }
}

float stream(const void *memory, int64_t bytes, int threads) {
  constexpr int64_t kPart = 1 << 18;
  float *sums = static_cast<float *>(scratch(0, sizeof(float) * (bytes / kPart)));
  pool::parallel(int(bytes / kPart), threads, [&](int task) {
    const float *part = static_cast<const float *>(memory) + task * (kPart / 4);
    vf total[8] = {};
    for (int i = 0; i < kPart / 4; i += 8 * W)
      for (int j = 0; j < 8; j++) total[j] += load(part + i + j * W);
    for (int j = 1; j < 8; j++) total[0] += total[j];
    sums[task] = sum(total[0]);
  });
  float total = 0;
  for (int i = 0; i < bytes / kPart; i++) total += sums[i];
  return total;
}

}  // namespace

constexpr LinearKernels linear_kernels = {linear, stream};

}  // namespace OUTRIDER_ISA
