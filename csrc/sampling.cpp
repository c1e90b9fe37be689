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
constexpr float kGuessed = -8;  // shaped logits below this are not guessed,
constexpr size_t kMany = 1024;  // nor others than so many, the likeliest without noise

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

std::vector<std::pair<int, float>> guess(const Draw &d, int vocab, const int64_t *ids, int count) {
  const ElementwiseKernels &own = kernels().elementwise;
  int top;
  own.argmax(d.logits, 1, vocab, &top, 1);
  if (top < 0) return {};
  float *shaped = static_cast<float *>(scratch(5, sizeof(float) * vocab));
  float *weights = static_cast<float *>(scratch(6, sizeof(float) * vocab));
  int32_t *places = static_cast<int32_t *>(scratch(7, sizeof(int32_t) * vocab));
  own.shape(d.logits, vocab, d.logits[top], d.temperature ? d.temperature : 1, shaped);
  double total = own.weigh(shaped, vocab, -kInfinity, weights);
  const float least = std::max(kGuessed, d.least);
  float floor = d.temperature ? least : std::max(least, -1.f);  // without noise the first few are enough
  int many = own.above(shaped, vocab, floor, places);
  while (many < count && floor > least) many = own.above(shaped, vocab, floor = std::max(least, 2 * floor), places);
  std::vector<std::pair<int, float>> found;
  for (int i = 0; i < many; i++) found.push_back({places[i], shaped[places[i]]});
  const auto larger = [](const auto &a, const auto &b) { return a.second > b.second; };
  if (d.temperature) {
    if (found.size() > kMany) {
      std::nth_element(found.begin(), found.begin() + kMany, found.end(), larger);
      found.resize(kMany);
    }
    size_t kept = d.top_k ? std::min<size_t>(d.top_k, found.size()) : found.size();
    if (d.top_p < 1 || kept < found.size()) {
      std::sort(found.begin(), found.end(), larger);
      double before = 0;
      for (size_t i = 0; i < kept; before += weights[found[i++].first] / total)
        if (i && before >= d.top_p) kept = i;
      found.resize(kept);
    }
    total = 0;
    for (auto &[place, score] : found) {
      score -= float(std::log(-std::log(uniform(d.key, int(ids[place])))));
      total += std::exp(double(score));
    }
  }
  const auto end = found.begin() + std::min<size_t>(count, found.size());
  std::partial_sort(found.begin(), end, found.end(), larger);
  found.erase(end, found.end());
  for (auto &[place, score] : found) score -= float(std::log(total));
  return found;
}

int draw(const Draw &d, int vocab) {
  const ElementwiseKernels &own = kernels().elementwise;
  int top;
  own.argmax(d.logits, 1, vocab, &top, 1);
  if (top < 0) return kUnsure;
  float *shaped = static_cast<float *>(scratch(5, sizeof(float) * vocab));
  float *weights = static_cast<float *>(scratch(6, sizeof(float) * vocab));
  int32_t *places = static_cast<int32_t *>(scratch(7, sizeof(int32_t) * vocab));
  const bool by_count = 0 < d.top_k && d.top_k < vocab, all = !by_count && d.top_p >= 1 && d.least == -kInfinity && vocab > kFew;
  const float most = d.logits[top];
  const auto shaped_of = [&](int token) { return (d.logits[token] - most) / d.temperature; };
  if (!all) own.shape(d.logits, vocab, most, d.temperature, shaped);
  const auto larger = [&](int a, int b) { return shaped[a] > shaped[b]; };
  float floor = -kInfinity, certain = -kInfinity;  // of what may be kept, and of what is kept beyond doubt
  if (by_count) {
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
    // What stands before `begin` is kept, whatever its order; the next ones are sorted, and decide.
    int begin = 0, end = found;
    double before = 0;
    while (end - begin > kFew) {
      const int middle = begin + (end - begin) / 2;
      std::nth_element(places + begin, places + middle, places + end, larger);
      double share = 0;
      for (int i = begin; i < middle; i++) share += weights[places[i]] / total;
      if (before + share < d.top_p - kDoubt) begin = middle, before += share;
      else end = middle;
    }
    end = std::min(found, end + 4 * kFew);
    if (end < found) std::nth_element(places + begin, places + end, places + found, larger);
    std::sort(places + begin, places + end, larger);
    int sure = begin, maybe = begin;  // the last that is kept beyond doubt, and the last that may be
    for (int i = begin; i < end && (!i || before < enough); before += weights[places[i++]] / total) {
      maybe = i;
      if (before < d.top_p - kDoubt) sure = i;
    }
    while (maybe + 1 < end && weights[places[maybe + 1]] > weights[places[maybe]] * (1 - kDoubt)) maybe++;
    if (maybe + 1 == end && end < found) return kUnsure;
    const float least = shaped[places[maybe]];
    certain = shaped[places[sure]];
    // All that were looked at may be kept: so may the rest, unless it was looked at.
    if (maybe + 1 == found && before < enough && own.above(shaped, vocab, floor, places) != found) return kUnsure;
    floor = least;
  }
  floor = std::max(floor, d.least);
  int found = all ? vocab : own.above(shaped, vocab, floor, places);
  if (found > kFew) {
    float *ratios = weights;
    const float best = all ? own.race(d.logits, vocab, most, -1 / d.temperature, floor, d.key, ratios)
                           : own.race(shaped, vocab, 0, -1, floor, d.key, ratios);
    // The choice is where -log(u) / weight is least, and 1 - u is no more than -log(u): who is to win must be before the
    // time of one that is early.
    own.above(ratios, vocab, best, places);
    const double time = -std::log(uniform(d.key, places[0])) / std::exp(double(shaped_of(places[0])));
    found = own.above(ratios, vocab, float(-time * (1 + 4 * kGap)), places);
  }
  int best = kUnsure;
  float first = -kInfinity, second = -kInfinity;
  for (int i = 0; i < found; i++) {
    const int token = places[i];
    const float score = shaped_of(token) + float(-std::log(-std::log(uniform(d.key, token))));
    if (score > first) second = first, first = score, best = token;
    else second = std::max(second, score);
  }
  const bool clear = first - second > kGap * std::max(1.0f, std::abs(first) / 8);
  return clear && shaped_of(best) >= certain ? best : kUnsure;
}
