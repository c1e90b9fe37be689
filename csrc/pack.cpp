#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "linear.h"
#include "pool.h"

namespace {

// at(i, k): where place i has its number k; of the next four k it is four lines of places further on.
template <class T, class At>
void pack_panel(const Weights &w, const void *plain, void *packed, int panel, const At &at) {
  T *to = static_cast<T *>(packed);
  const int inputs = w.inputs;
  std::fill_n(to, size_t(w.padded()) * kPanel, T(0));
  for (int i = 0; i < kPanel; i++) {
    const int output = w.output(panel, i);
    if (output < 0) continue;
    const T *row = static_cast<const T *>(plain) + size_t(output) * inputs;
    const size_t own[] = {at(i, 0), at(i, 1), at(i, 2), at(i, 3)};
    T *four = to;
    int k = 0;
    for (; k + 4 <= inputs; k += 4, four += 4 * kPanel)
      for (int j = 0; j < 4; j++) four[own[j]] = row[k + j];
    for (int j = 0; k + j < inputs; j++) four[own[j]] = row[k + j];
  }
}

uint8_t fp4_code(int plain) {
  const int size = plain < 0 ? -plain : plain;
  return uint8_t((std::find(kE2M1, kE2M1 + 7, size) - kE2M1) | (plain < 0 ? 8 : 0));
}

// Formats of 4 to 6 bits: of each four k the lower four bits of all places, place i beside i + 16 in a byte, then the
// upper bits.
void pack_bits(const Weights &w, const int8_t *plain, uint8_t *to, int panel) {
  const int depth = w.padded(), bits = w.bits(), bytes = kPanel * 4 * bits / 8, half = kPanel / 2;
  const int zero = w.format == kI4 ? 8 : w.format == kI6 ? 32 : 0;
  uint8_t code_of[256];  // by the number's own bits
  for (int i = 0; i < 256; i++) code_of[i] = w.format == kFp4 ? fp4_code(int8_t(i)) : uint8_t(zero + i);
  std::vector<uint8_t> codes(2 * depth);
  for (int i = 0; i < half; i++) {
    for (int upper = 0; upper < 2; upper++) {
      const int output = w.output(panel, i + upper * half), known = output < 0 ? 0 : w.inputs;
      const int8_t *row = plain + size_t(output < 0 ? 0 : output) * w.inputs;
      uint8_t *own = codes.data() + upper * depth;
      for (int k = 0; k < known; k++) own[k] = code_of[uint8_t(row[k])];
      std::fill(own + known, own + depth, code_of[0]);
    }
    const uint8_t *a = codes.data(), *b = a + depth;
    for (uint8_t *step = to; step < to + w.panel_bytes(); step += bytes, a += 4, b += 4) {
      static constexpr int kOrder[] = {0, 2, 1, 3};
      for (int j = 0; j < 4; j++) step[4 * i + j] = uint8_t((a[kOrder[j]] & 0xf) | b[kOrder[j]] << 4);
      for (int j = 0; bits == 5 && j < 4; j++) {  // two of these, from a or b: a bit each
        const uint8_t *two = (j % 2 ? b : a) + j / 2 * 2, both = uint8_t((two[0] >> 4 & 1) | (two[1] >> 4 & 1) << 1);
        uint8_t &eight = step[64 + 4 * j + i / 4];
        eight = uint8_t((i % 4 ? eight : 0) | both << i % 4 * 2);
      }
      for (int j = 0; bits == 6 && j < 2; j++)
        step[64 + 2 * i + j] = uint8_t((a[j] >> 4 & 3) | (b[j] >> 4 & 3) << 2 | (a[j + 2] >> 4 & 3) << 4 | b[j + 2] >> 4 << 6);
    }
  }
}

float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

float from_half(uint16_t x) {
  const uint32_t magnitude = x & 0x7fff, infinite = magnitude >= 0x7c00 ? 0x7f800000 : 0;
  uint32_t bits;
  const float scaled = from_bits(magnitude << 13) * 0x1p112f;  // the exponent's bias; subnormal numbers become normal
  memcpy(&bits, &scaled, 4);
  return from_bits(bits | infinite | (x & 0x8000u) << 16);
}

// To nearest even.
uint16_t to_bfloat(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

float from_fp8(uint8_t x) {
  const int size = x & 0x7f;
  const float number = size < 8 ? float(size) * 0x1p-9f : from_bits((uint32_t(size) << 20) + (120u << 23));
  return x & 0x80 ? -number : number;
}

// The number that pack_bits, or pack_panel of bytes, put at k of place i.
float value_at(const Weights &w, const uint8_t *panel, int i, int k) {
  if (w.format == kI8) return int8_t(panel[w.byte_at(i, k)]);
  if (w.format == kFp8) return from_fp8(panel[size_t(k / 2) * 2 * kPanel + 2 * i + k % 2]);
  const int bits = w.bits(), word = i % 16 * 2 + k % 2, j = k % 4 / 2 * 2 + i / 16;
  const uint8_t *step = panel + size_t(k / 4) * (kPanel * 4 * bits / 8);
  int code = step[2 * word + j / 2] >> j % 2 * 4 & 0xf;
  if (bits == 5) code |= (step[64 + 4 * j + word / 8] >> word % 8 & 1) << 4;
  if (bits == 6) code |= (step[64 + word] >> 2 * j & 3) << 4;
  if (w.format == kFp4) return code & 8 ? -kE2M1[code & 7] : kE2M1[code];
  return code - (w.format == kI4 ? 8 : w.format == kI6 ? 32 : 0);
}

float factor_at(const Weights &w, const Factors &factors, int panel, int i, int k) {
  const size_t each = (size_t(panel) * w.groups() + k / w.group) * kPanel + i;
  if (factors.kind == Factors::kHalf) return from_half(static_cast<const uint16_t *>(factors.each)[each]);
  if (factors.kind == Factors::kBfloat) return from_bits(uint32_t(static_cast<const uint16_t *>(factors.each)[each]) << 16);
  if (factors.kind == Factors::kFloat) return static_cast<const float *>(factors.each)[each];
  if (factors.kind == Factors::kZeros) return -factor_at(w, w.scales, panel, i, k) * static_cast<const int8_t *>(factors.each)[each];
  const float coarse = from_half(factors.coarse[(size_t(panel) * w.supers() + k / kSuper) * kPanel + i].bits);
  return coarse * static_cast<const int8_t *>(factors.each)[each];
}

// `exponents` are those of one number of 4 bytes, or of two; `low` their lowest bits. Of a number that is not finite
// they are ones, and with the lowest added they carry into the sign's place.
bool finite(const char *numbers, int64_t bytes, uint32_t exponents, uint32_t low) {
  uint32_t sums = 0, four;
  int64_t at = 0;
  for (; at + 4 <= bytes; at += 4) {
    memcpy(&four, numbers + at, 4);
    sums |= (four & exponents) + low;
  }
  four = 0;
  memcpy(&four, numbers + at, bytes - at);
  sums |= (four & exponents) + low;
  return !(sums & (exponents + low));
}

}  // namespace

Weights part_of(const Weights &w, int first, int last) {
  Weights part = w;
  const int width = (last < w.panels() ? last * w.step() : w.width()) - first * w.step();
  part.outputs = w.gated ? 2 * width : width;
  part.data = static_cast<const char *>(w.data) + first * w.panel_bytes();
  if (w.bias) part.bias = static_cast<const char *>(w.bias) + int64_t(first) * w.step() * (w.format == kF32 ? 4 : 2);
  for (Factors *factors : {&part.scales, &part.offsets}) {
    static constexpr int kSizes[] = {2, 2, 1, 4, 1};  // bytes, by kind
    const int64_t at = int64_t(first) * kPanel;
    if (factors->each) factors->each = static_cast<const char *>(factors->each) + at * w.groups() * kSizes[factors->kind];
    if (factors->coarse) factors->coarse += at * w.supers();
  }
  return part;
}

void unpack_row(const Weights &w, int output, void *to) {
  const int panel = output / kPanel, i = output % kPanel;
  const uint8_t *data = static_cast<const uint8_t *>(w.data) + panel * w.panel_bytes();
  const uint16_t *halves = reinterpret_cast<const uint16_t *>(data);
  float scale = 0, offset = 0;
  for (int k = 0; k < w.inputs; k++) {
    if (w.format == kF32) {
      static_cast<float *>(to)[k] = reinterpret_cast<const float *>(data)[size_t(k) * kPanel + i];
    } else if (w.format == kF16) {
      static_cast<uint16_t *>(to)[k] = halves[size_t(k) * kPanel + i];
    } else if (w.format == kBF16) {
      static_cast<uint16_t *>(to)[k] = halves[size_t(k / 2) * 2 * kPanel + 2 * i + k % 2];
    } else {
      const int at = w.place ? w.place[k] : k;
      if (w.place || k % w.group == 0) {
        scale = factor_at(w, w.scales, panel, i, at);
        offset = w.offsets.each ? factor_at(w, w.offsets, panel, i, at) : 0;
      }
      static_cast<uint16_t *>(to)[k] = to_bfloat(value_at(w, data, i, at) * scale + offset);
    }
  }
}

void pack_weights(const Weights &w, const void *plain, void *packed, int threads) {
  const auto one = [](int i, int k) { return size_t(k) * kPanel + i; };
  const auto pair = [](int i, int k) { return size_t(k / 2) * 2 * kPanel + 2 * i + k % 2; };
  const auto byte = [&](int i, int k) { return w.byte_at(i, k); };
  pool::parallel(w.panels(), threads, [&](int panel) {
    char *to = static_cast<char *>(packed) + panel * w.panel_bytes();
    switch (w.format) {
      case kF32: return pack_panel<float>(w, plain, to, panel, one);
      case kF16: return pack_panel<uint16_t>(w, plain, to, panel, one);
      case kBF16: return pack_panel<uint16_t>(w, plain, to, panel, pair);
      case kFp8: return pack_panel<uint8_t>(w, plain, to, panel, pair);
      case kI8: return pack_panel<uint8_t>(w, plain, to, panel, byte);
      default: return pack_bits(w, static_cast<const int8_t *>(plain), reinterpret_cast<uint8_t *>(to), panel);
    }
  });
}

void pack_factors(const Weights &w, const void *plain, int count, int size, void *packed, int threads) {
  const auto pack = [&](auto zero) {
    using T = decltype(zero);
    pool::parallel(w.panels(), threads, [&](int panel) {
      T *to = static_cast<T *>(packed) + size_t(panel) * count * kPanel;
      for (int i = 0; i < kPanel; i++) {
        const int output = w.output(panel, i);
        const T *row = static_cast<const T *>(plain) + size_t(output < 0 ? 0 : output) * count;
        for (int n = 0; n < count; n++) to[size_t(n) * kPanel + i] = output < 0 ? zero : row[n];
      }
    });
  };
  if (size == 1) return pack(uint8_t(0));
  return size == 2 ? pack(uint16_t(0)) : pack(uint32_t(0));
}

bool all_finite(const void *numbers, int64_t count, Type type, int threads) {
  constexpr int64_t kSome = 1 << 22;  // bytes of a task
  const int64_t bytes = count * size_of(type);
  std::atomic<bool> all{true};
  pool::parallel(int((bytes + kSome - 1) / kSome), threads, [&](int task) {
    const char *from = static_cast<const char *>(numbers) + task * kSome;
    const int64_t some = std::min(bytes - task * kSome, kSome);
    const bool sound = type == Type::f32   ? finite(from, some, 0x7f800000, 0x00800000)
                       : type == Type::f16 ? finite(from, some, 0x7c007c00, 0x04000400)
                                           : finite(from, some, 0x7f807f80, 0x00800080);
    if (!sound) all = false;
  });
  return all;
}
