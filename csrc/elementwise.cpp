#include "elementwise.h"

#include "norm.h"
#include "pool.h"

namespace OUTRIDER_ISA {
namespace {

constexpr int kSerial = 32768;  // elements that are not worth waking a thread for

template <class A>
void norm_rows(const A *x, int rows, int width, const A *weight, float eps, A *y, int threads) {
  pool::parallel(rows, int64_t(rows) * width > kSerial ? threads : 1, [&](int r) {
    const A *from = x + size_t(r) * width;
    const float factor = rms_factor(from, width, eps);
    for (int k = 0; k < width; k += W)
      store_n(y + size_t(r) * width + k, normed(from, weight, k, width, factor), width - k);
  });
}

template <class A>
INLINE void turn(A *x, int dim, const A *cos, const A *sin, const A *norm, float eps) {
  const int half = dim / 2;
  const float factor = norm ? rms_factor(x, dim, eps) : 1;
  for (int i = 0; i < half; i += W) {
    const int n = half - i;
    vf low = load_n(x + i, n), high = load_n(x + half + i, n);
    if (norm) {
      low = low * factor * load_n(norm + i, n);
      high = high * factor * load_n(norm + half + i, n);
    }
    const vf a = fma(high, load_n(sin + i, n), low * load_n(cos + i, n));
    const vf b = fma(low, load_n(sin + half + i, n), high * load_n(cos + half + i, n));
    store_n(x + i, a, n);
    store_n(x + half + i, b, n);
  }
}

template <class A>
void turn_rows(A *qkv, int rows, int stride, int heads, int queries, int dim, const A *cos, const A *sin,
               const A *q_norm, const A *k_norm, float eps, int threads) {
  pool::parallel(rows, int64_t(rows) * heads * dim > kSerial ? threads : 1, [&](int r) {
    for (int h = 0; h < heads; h++)
      turn(qkv + size_t(r) * stride + h * dim, dim, cos + size_t(r) * dim, sin + size_t(r) * dim,
           h < queries ? q_norm : k_norm, eps);
  });
}

template <class A>
void gate_rows(const A *x, int rows, int width, Gate gate, A *y, int threads) {
  pool::parallel(rows, int64_t(rows) * width > kSerial ? threads : 1, [&](int r) {
    const A *gates = x + size_t(r) * 2 * width, *ups = gates + width;
    for (int i = 0; i < width; i += W) {
      const int n = width - i;
      vf g = load_n(gates + i, n), up = load_n(ups + i, n);
      switch (gate.kind) {
        case Gate::kSilu: g = silu(g); break;
        case Gate::kGelu: g = g / (1.0f + exp(g * fma(g * g, splat(-2 * 0.044715f * 0.7978845608f), splat(-2 * 0.7978845608f)))); break;
        case Gate::kClamped:
          g = min(splat(gate.limit), g), up = min(splat(gate.limit), max(splat(-gate.limit), up)) + 1.0f;
          g = g / (1.0f + exp(g * -gate.alpha));
      }
      store_n(y + size_t(r) * width + i, g * up, n);
    }
  });
}

template <class A>
void add_all(A *x, const A *y, int64_t count, float factor, int threads) {
  pool::parallel(int((count + kSerial - 1) / kSerial), threads, [&](int part) {
    const int64_t end = (part + 1) * int64_t(kSerial) < count ? (part + 1) * int64_t(kSerial) : count;
    for (int64_t i = part * int64_t(kSerial); i < end; i += W) {
      const int n = int(end - i);
      store_n(x + i, load_n(x + i, n) + load_n(y + i, n) * factor, n);
    }
  });
}

template <class A>
void combine_rows(const float *parts, const int *at, const float *weights, int rows, int each, int width,
                  const A *residual, A *y, int threads) {
  pool::parallel(rows, int64_t(rows) * width * each > kSerial ? threads : 1, [&](int r) {
    for (int i = 0; i < width; i += W) {
      vf total = {};
      for (int j = 0; j < each; j++)
        total = fma(splat(weights[r * each + j]), load_n(parts + size_t(at[r * each + j]) * width + i, width - i), total);
      if (residual) total += load_n(residual + size_t(r) * width + i, width - i);
      store_n(y + size_t(r) * width + i, total, width - i);
    }
  });
}

int best_of(const float *x, int width) {
  vf most = splat(-__builtin_inff());
  vi odd = {};
  int k = 0;
  for (; k + W <= width; k += W) {
    const vf v = load(x + k);
    odd |= v != v;
    most = max(v, most);
  }
  float top = max(most);
  bool fine = true;
  for (int i = 0; i < W; i++) fine &= !odd[i];
  for (; k < width; k++) {
    fine &= x[k] == x[k];
    if (x[k] > top) top = x[k];
  }
  if (!fine || __builtin_isinf(top)) return -1;
  for (k = 0; k + W <= width; k += W) {
    const vi here = load(x + k) == top;
    for (int i = 0; i < W; i++)
      if (here[i]) return k + i;
  }
  while (x[k] != top) k++;
  return k;
}

void argmax(const float *x, int rows, int width, int *best, int threads) {
  pool::parallel(rows, int64_t(rows) * width > 16 * kSerial ? threads : 1,
                 [&](int r) { best[r] = width ? best_of(x + size_t(r) * width, width) : -1; });
}

void shape(const float *x, int n, float most, float temperature, float *shaped) {
  for (int k = 0; k < n; k += W) store_n(shaped + k, (load_n(x + k, n - k) - most) / temperature, n - k);
}

double weigh(const float *x, int n, float floor, float *weights) {
  double total = 0;
  for (int k = 0; k < n;) {
    vf part = {};
    for (const int end = k + 64 * W; k < n && k < end; k += W) {
      const vf v = load_n(x + k, n - k);
      const vf weight = v >= floor ? exp(v) : vf{};
      store_n(weights + k, weight, n - k);
      for (int i = n - k; i < W; i++) part[i] -= weight[i];  // of the row's end
      part += weight;
    }
    total += sum(part);
  }
  return total;
}

int above(const float *x, int n, float floor, int32_t *places) {
  int count = 0;
  for (int k = 0; k < n; k += W) {
    const vi here = load_n(x + k, n - k) >= floor;
#if defined(__AVX512F__)
    if (!_mm512_test_epi32_mask((__m512i)here, (__m512i)here)) continue;
#elif defined(__AVX2__)
    if (!_mm256_movemask_ps((__m256)here)) continue;
#endif
    for (int i = 0; i < W && k + i < n; i++)
      if (here[i]) places[count++] = k + i;
  }
  return count;
}

float race(const float *x, int n, float most, float factor, float floor, uint64_t key, float *ratios) {
  constexpr int H = W / 2, kPart = 64 * W;  // of which the cache keeps what one loop leaves for the next
  typedef uint64_t vl __attribute__((vector_size(4 * W), may_alias));
  typedef double vd __attribute__((vector_size(4 * W), may_alias));
  typedef float vs __attribute__((vector_size(2 * W), may_alias));
  float part[kPart], best = -__builtin_inff();
  vl step;
  for (int i = 0; i < H; i++) step[i] = uint64_t(i + 1) * 0x9E3779B97F4A7C15 + key;
  for (int from = 0; from < n; from += kPart) {
    const int size = n - from < kPart ? n - from : kPart;
    for (int k = 0; k < size; k += W) {
      const vf v = load_n(x + from + k, size - k), inverse = exp((v - most) * factor);
      store(part + k, v >= floor ? -inverse : splat(-__builtin_inff()));
    }
    for (int k = size; k < kPart; k++) part[k] = -__builtin_inff();
    vs top = vs{} - __builtin_inff();
    for (int k = 0; k < kPart; k += H, step += H * 0x9E3779B97F4A7C15) {
      vl z = (step ^ step >> 30) * 0xBF58476D1CE4E5B9;
      z = (z ^ z >> 27) * 0x94D049BB133111EB;
      z ^= z >> 31;
      // What is left to 1: an integer of 52 bits becomes the fraction of a number between 1 and 2.
      const vd rest = (vd)(~z >> 12 | 0x3ff0000000000000) - (1 - 0x1p-53);
      const vs ratio = __builtin_convertvector(rest, vs) * load_as<vs>(part + k);
      memcpy(part + k, &ratio, sizeof ratio);
      top = top > ratio ? top : ratio;
    }
    for (int i = 0; i < H; i++) best = top[i] > best ? top[i] : best;
    memcpy(ratios + from, part, sizeof(float) * size);
  }
  return best;
}

template <class A>
const A *as(A *, const void *p) { return static_cast<const A *>(p); }
template <class A>
A *as(A *, void *p) { return static_cast<A *>(p); }

void rms_norm(const void *x, int rows, int width, const void *weight, float eps, void *y, Type type, int threads) {
  with_type(type, [&](auto t) { norm_rows(as(t, x), rows, width, as(t, weight), eps, as(t, y), threads); });
}

void rope(void *qkv, int rows, int stride, int heads, int queries, int dim, const void *cos, const void *sin,
          const void *q_norm, const void *k_norm, float eps, Type type, int threads) {
  with_type(type, [&](auto t) {
    turn_rows(as(t, qkv), rows, stride, heads, queries, dim, as(t, cos), as(t, sin), as(t, q_norm), as(t, k_norm), eps, threads);
  });
}

void gate(const void *x, int rows, int width, Gate gate, void *y, Type type, int threads) {
  with_type(type, [&](auto t) { gate_rows(as(t, x), rows, width, gate, as(t, y), threads); });
}

void add(void *x, const void *y, int64_t count, float factor, Type type, int threads) {
  with_type(type, [&](auto t) { add_all(as(t, x), as(t, y), count, factor, threads); });
}

void combine(const float *parts, const int *at, const float *weights, int rows, int each, int width,
             const void *residual, void *y, Type type, int threads) {
  with_type(type, [&](auto t) {
    combine_rows(parts, at, weights, rows, each, width, as(t, residual), as(t, y), threads);
  });
}

}  // namespace

constexpr ElementwiseKernels elementwise_kernels = {rms_norm, rope, gate, add, combine, argmax, shape, weigh, above, race};

}  // namespace OUTRIDER_ISA
