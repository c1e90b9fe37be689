#include <algorithm>
#include <cstring>

#include "linear.h"
#include "pool.h"

namespace {

template <class T>
void pack_panel(const Weights &w, const T *plain, T *to, int panel) {
  std::fill_n(to, size_t(w.padded()) * kPanel, T(0));
  for (int i = 0; i < kPanel; i++) {
    const int output = w.output(panel, i);
    if (output < 0) continue;
    const T *row = plain + size_t(output) * w.inputs;
    for (int k = 0; k < w.inputs; k++) {
      const int pair = w.format == kI8 ? i / 16 * 32 + k % 2 * 16 + i % 16 : 2 * i + k % 2;
      to[w.format == kF32 ? size_t(k) * kPanel + i : size_t(k / 2) * 2 * kPanel + pair] = row[k];
    }
  }
}

// Formats of 4 to 6 bits.
void pack_bits(const Weights &w, const int8_t *plain, uint8_t *to, int panel) {
  const int depth = w.padded(), bits = w.bits(), bytes = kPanel * 4 * bits / 8;
  const int zero = w.format == kI4 ? 8 : w.format == kI6 ? 32 : 0;
  std::fill_n(to, w.panel_bytes(), uint8_t(0));
  for (int i = 0; i < kPanel; i++) {
    const int output = w.output(panel, i);
    const int8_t *row = plain + size_t(output < 0 ? 0 : output) * w.inputs;
    for (int k = 0; k < depth; k++) {
      const int code = zero + (output < 0 || k >= w.inputs ? 0 : row[k]), upper = code >> 4;
      uint8_t *step = to + size_t(k / 4) * bytes;
      const int word = i % 16 * 2 + k % 2, j = k % 4 / 2 * 2 + i / 16;
      step[2 * word + j / 2] |= uint8_t((code & 0xf) << j % 2 * 4);
      if (bits == 5) step[64 + 4 * j + word / 8] |= uint8_t((upper & 1) << word % 8);
      if (bits == 6) step[64 + word] |= uint8_t((upper & 3) << 2 * j);
    }
  }
}

}  // namespace

void pack_weights(const Weights &w, const void *plain, void *packed, int threads) {
  pool::parallel(w.panels(), threads, [&](int panel) {
    char *to = static_cast<char *>(packed) + panel * w.panel_bytes();
    switch (w.format) {
      case kF32: return pack_panel(w, static_cast<const float *>(plain), reinterpret_cast<float *>(to), panel);
      case kBF16: return pack_panel(w, static_cast<const uint16_t *>(plain), reinterpret_cast<uint16_t *>(to), panel);
      case kI8: return pack_panel(w, static_cast<const int8_t *>(plain), reinterpret_cast<int8_t *>(to), panel);
      default: return pack_bits(w, static_cast<const int8_t *>(plain), reinterpret_cast<uint8_t *>(to), panel);
    }
  });
}

void pack_factors(const Weights &w, const void *plain, int count, int size, void *packed) {
  char *to = static_cast<char *>(packed);
  for (int panel = 0; panel < w.panels(); panel++)
    for (int n = 0; n < count; n++)
      for (int i = 0; i < kPanel; i++, to += size) {
        const int output = w.output(panel, i);
        if (output < 0) memset(to, 0, size);
        else memcpy(to, static_cast<const char *>(plain) + (size_t(output) * count + n) * size, size);
      }
}
