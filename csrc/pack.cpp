#include <algorithm>
#include <cstring>

#include "linear.h"
#include "pool.h"

namespace {

template <class T>
void pack_panel(const Weights &w, const T *plain, T *to, int panel) {
  const int depth = w.padded(), step = w.format == kF32 ? 1 : 2;
  std::fill_n(to, size_t(depth) * kPanel, T(0));
  for (int i = 0; i < kPanel; i++) {
    const int output = w.output(panel, i);
    if (output < 0) continue;
    const T *row = plain + size_t(output) * w.inputs;
    for (int k = 0; k < w.inputs; k++) to[(size_t(k / step) * kPanel + i) * step + k % step] = row[k];
  }
}

void pack_nibbles(const Weights &w, const int8_t *plain, uint16_t *to, int panel) {
  std::fill_n(to, size_t(w.padded()) * kPanel / 4, uint16_t(0x8888));
  for (int i = 0; i < kPanel; i++) {
    const int output = w.output(panel, i);
    if (output < 0) continue;
    const int8_t *row = plain + size_t(output) * w.inputs;
    for (int k = 0; k < w.inputs; k++) {
      uint16_t &word = to[size_t(k / 4) * kPanel + i % 16 * 2 + k % 2];
      const int shift = 4 * (k % 4 / 2 * 2 + i / 16);
      word = uint16_t((word & ~(0xf << shift)) | (((row[k] + 8) & 0xf) << shift));
    }
  }
}

}  // namespace

void pack_weights(const Weights &w, const void *plain, void *packed, int threads) {
  pool::parallel(w.panels(), threads, [&](int panel) {
    char *to = static_cast<char *>(packed) + panel * w.panel_bytes();
    if (w.format == kF32) pack_panel(w, static_cast<const float *>(plain), reinterpret_cast<float *>(to), panel);
    if (w.format == kBF16) pack_panel(w, static_cast<const uint16_t *>(plain), reinterpret_cast<uint16_t *>(to), panel);
    if (w.format == kI8) pack_panel(w, static_cast<const int8_t *>(plain), reinterpret_cast<int8_t *>(to), panel);
    if (w.format == kI4) pack_nibbles(w, static_cast<const int8_t *>(plain), reinterpret_cast<uint16_t *>(to), panel);
  });
}

void pack_groups(const Weights &w, const uint16_t *plain, uint16_t *packed) {
  const int groups = w.groups();
  for (int panel = 0; panel < w.panels(); panel++)
    for (int i = 0; i < kPanel; i++) {
      const int output = w.output(panel, i);
      for (int g = 0; g < groups; g++)
        packed[(size_t(panel) * groups + g) * kPanel + i] = output < 0 ? 0 : plain[size_t(output) * groups + g];
    }
}
