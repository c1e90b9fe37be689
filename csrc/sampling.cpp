#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "scratch.h"

namespace {

// What the powers, sums and logarithms of this file and of PyTorch may differ by, with room to spare: relative errors of
// probabilities, and absolute ones of logits with noise.
constexpr double kDoubt = 2e-5, kGap = 2e-4;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kFew = 256;  // whose noise is computed one by one

double uniform(uint64_t key, int token) {
  uint64_t z = uint64_t(token + 1) * 0x9E3779B97F4A7C15 + key;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  z ^= z >> 31;
  return (double(z >> 12) + 0.5) * 0x1p-52;
}

// The places of the shaped logits that are at least as large as the `count`th one, and maybe some more.
int largest(const float *shaped, int vocab, int count, int32_t *places) {
  int found = 0;
  for (float floor = -8; found < count; floor *= 2)
    found = kernels().elementwise.above(shaped, vocab, floor < -1e6f ? -kInfinity : floor, places);
  return found;
}

}  // namespace

int draw(const Draw &d, int vocab) {
  const ElementwiseKernels &own = kernels().elementwise;
  int top;
  own.argmax(d.logits, 1, vocab, &top, 1);
  if (top < 0) return kUnsure;
  float *shaped = static_cast<float *>(scratch(5, sizeof(float) * vocab));
  float *weights = static_cast<float *>(scratch(6, sizeof(float) * vocab));
  int32_t *places = static_cast<int32_t *>(scratch(7, sizeof(int32_t) * vocab));
  own.shape(d.logits, vocab, d.logits[top], d.temperature, shaped);
  const auto larger = [&](int a, int b) { return shaped[a] > shaped[b]; };
  float floor = -kInfinity;
  if (0 < d.top_k && d.top_k < vocab) {
    const int found = largest(shaped, vocab, d.top_k, places);
    std::nth_element(places, places + d.top_k - 1, places + found, larger);
    floor = shaped[places[d.top_k - 1]];
  }
  if (d.top_p < 1) {
    const double total = own.weigh(shaped, vocab, floor, weights), enough = d.top_p + kDoubt;
    double mass = -1;
    int found = 0;
    for (float cut = -4; mass < enough * total && cut > -1e6f; cut *= 2) {
      found = own.above(shaped, vocab, std::max(cut, floor), places);
      mass = 0;
      for (int i = 0; i < found; i++) mass += weights[places[i]];
      if (cut < floor) break;
    }
    std::sort(places, places + found, larger);
    double before = 0;
    int last = 0;
    for (int i = 0; i < found; before += weights[places[i++]] / total) {
      if (i && std::abs(before - d.top_p) < kDoubt) return kUnsure;
      if (i && before > d.top_p) break;
      last = i;
    }
    if (last + 1 < found && weights[places[last + 1]] > weights[places[last]] * (1 - kDoubt)) return kUnsure;
    if (last + 1 == found && before < enough) {
      // All that were looked at are kept: so is the rest only if it was looked at.
      if (own.above(shaped, vocab, floor, places) != found) return kUnsure;
    } else {
      floor = shaped[places[last]];
    }
  }
  floor = std::max(floor, d.least);
  int found = floor > -kInfinity || vocab <= kFew ? own.above(shaped, vocab, floor, places) : vocab;
  if (found > kFew) {
    own.weigh(shaped, vocab, floor, weights);
    float *ratios = weights;
    own.race(weights, vocab, d.key, ratios);
    // The choice is where -log(u) / weight is least, and 1 - u is no more than -log(u): who is to win must be before the
    // time of one that is early.
    int early;
    own.argmax(ratios, 1, vocab, &early, 1);
    if (early < 0) return kUnsure;
    const double time = -std::log(uniform(d.key, early)) / std::exp(double(shaped[early]));
    found = own.above(ratios, vocab, float(-time * (1 + 4 * kGap)), places);
  }
  int best = kUnsure;
  float most = -kInfinity, second = -kInfinity;
  for (int i = 0; i < found; i++) {
    const int token = places[i];
    const float score = shaped[token] + float(-std::log(-std::log(uniform(d.key, token))));
    if (score > most) second = most, most = score, best = token;
    else second = std::max(second, score);
  }
  return most - second > kGap * std::max(1.0f, std::abs(most) / 8) ? best : kUnsure;
}
