// Blocks of GGUF files taken apart (quantize.py has the same in PyTorch, and what the parts mean).
#include "blocks.h"

#include <algorithm>
#include <stdexcept>

#include "linear.h"
#include "pool.h"

namespace {

// The lowest `width` bits of `stride` bytes, then the next ones of these, and so on; then of the next bytes. They are
// put `up` bits higher beside what is there.
void spread(const uint8_t *from, int bytes, int width, int stride, int up, uint8_t *to) {
  for (const uint8_t *end = from + bytes; from < end; from += stride)
    for (int shift = 0; shift < 8; shift += width, to += stride)
      for (int j = 0; j < stride; j++) to[j] |= uint8_t((from[j] >> shift & ((1 << width) - 1)) << up);
}

// 8 scales and 8 minima of 6 bits: the first 4 of either, in whose bytes lie 2 upper bits of the others, then the
// others' lower bits.
void six_bits(const uint8_t *from, int8_t *scales, int8_t *minima) {
  for (int j = 0; j < 4; j++) {
    const uint8_t scale = from[j], least = from[4 + j], lower = from[8 + j];
    scales[j] = int8_t(scale & 63);
    minima[j] = int8_t(least & 63);
    scales[4 + j] = int8_t((lower & 15) | (scale >> 2 & 48));
    minima[4 + j] = int8_t(lower >> 4 | (least >> 2 & 48));
  }
}

}  // namespace

void take_apart(Blocks kind, const uint8_t *blocks, int64_t count, int8_t *values, int8_t *scales, int8_t *minima, int threads) {
  constexpr int64_t kSome = 4096;  // blocks of a task
  const int size = int(kind), weights = size > 34 ? 256 : 32;
  pool::parallel(int((count + kSome - 1) / kSome), threads, [&](int task) {
    for (int64_t n = task * kSome; n < std::min(count, (task + 1) * kSome); n++) {
      const uint8_t *block = blocks + n * size;
      int8_t *own = values + n * weights;
      uint8_t *to = reinterpret_cast<uint8_t *>(own);
      std::fill_n(to, weights, uint8_t(0));
      switch (kind) {
        case Blocks::kQ8_0: std::copy_n(block + 2, 32, to); break;
        case Blocks::kQ4_0: spread(block + 2, 16, 4, 16, 0, to); break;
        case Blocks::kMXFP4:
          spread(block + 1, 16, 4, 16, 0, to);
          for (int k = 0; k < 32; k++) own[k] = int8_t(own[k] & 8 ? -kE2M1[own[k] & 7] : kE2M1[own[k]]);
          break;
        case Blocks::kQ4_1: spread(block + 4, 16, 4, 16, 0, to); break;
        case Blocks::kQ6_K:
          spread(block, 128, 4, 64, 0, to);
          spread(block + 128, 64, 2, 32, 4, to);
          std::copy_n(block + 192, 16, scales + 16 * n);
          break;
        case Blocks::kQ5_K: spread(block + 16, 32, 1, 32, 4, to);
        [[fallthrough]];
        case Blocks::kQ4_K:
          spread(block + size - 128, 128, 4, 32, 0, to);
          six_bits(block + 4, scales + 8 * n, minima + 8 * n);
          break;
        default: throw std::invalid_argument("blocks of an unknown kind");
      }
      const int zero = kind == Blocks::kQ4_0 ? 8 : kind == Blocks::kQ6_K ? 32 : 0;
      for (int k = 0; zero && k < weights; k++) own[k] = int8_t(own[k] - zero);
    }
  });
}
