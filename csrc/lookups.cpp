#include "lookups.h"

#include <algorithm>
#include <numeric>

namespace {

constexpr uint32_t kSeparator = 0xFFFFFFFF;
constexpr int kUnmet = 2;  // ways on that may be beside those that a store knows
constexpr uint32_t kTabled = 1 << 20;  // ids below this, which are all but damaged ones, have their places noted

}  // namespace

void NgramIndex::enter(const std::vector<int32_t> &tokens) { text.insert(text.end(), tokens.begin(), tokens.end()); }

NgramIndex::Copy NgramIndex::guess(const std::vector<int32_t> &beyond, int k) {
  for (; upto < size(); upto++) {  // text[upto] is there: the n-gram before it has a continuation
    uint64_t hash = kEmpty;
    for (int n = 1; n <= std::min(most, upto); n++) {
      hash = longer(hash, text[upto - n]);
      if (n >= least) ends[hash] = upto;
    }
  }
  const int settled = size();
  text.insert(text.end(), beyond.begin(), beyond.end());
  const int end = size();
  Copy copy;
  int at = -1, match = 0;
  uint64_t hash = kEmpty;
  for (int n = 1; n <= most && n < end; n++) {
    hash = longer(hash, text[end - n]);
    if (n < least) continue;
    const auto found = ends.find(hash);
    if (found == ends.end()) continue;
    at = found->second, match = n;
  }
  for (int i = 0; at >= 0 && i < k; i++) {
    copy.tokens.push_back(at + i < end ? text[at + i] : copy.tokens[at + i - end]);
    copy.trust.push_back(1 - 1 / double(1 + match + i));
  }
  text.resize(settled);
  return copy;
}

// The token at a place, and separators behind the end: a damaged suffix array may name any place.
static uint32_t token(const Shards::Shard &shard, int64_t place) {
  return place < shard.size ? __builtin_bswap32(shard.ids[place]) : kSeparator;
}

// Where `key` would stand in a suffix array: before what stands there, or if that begins so, before or `behind` it.
static int64_t bound(const Shards::Shard &shard, const uint32_t *key, int n, int64_t low, bool behind) {
  int64_t high = shard.size;
  if (key[0] + size_t(1) < shard.first.size()) {  // most steps would wait for memory only to find the first token
    low = std::max(low, int64_t(shard.first[key[0]]));
    high = shard.first[key[0] + 1];
  }
  while (low < high) {
    const int64_t mid = (low + high) / 2, place = shard.order[mid];
    __builtin_prefetch(shard.order + (low + mid) / 2);
    __builtin_prefetch(shard.order + (mid + 1 + high) / 2);
    int i = 0;
    while (i < n && token(shard, place + i) == key[i]) i++;
    // of those that begin so, separators stand last
    const bool before = i < n ? token(shard, place + i) < key[i] : behind && token(shard, place + n) < kSeparator;
    (before ? low : high) = before ? mid + 1 : mid;
  }
  return low;
}

Shards::Shards(std::vector<Shard> given, bool read) : shards(std::move(given)) {
  if (!read) return;
  for (Shard &shard : shards) {
    for (int64_t i = 0; i < shard.size; i++) {
      const uint32_t id = token(shard, i);
      if (id >= kTabled) continue;
      if (id + 1 >= shard.first.size()) shard.first.resize(id + 2);
      shard.first[id + 1]++;
    }
    std::partial_sum(shard.first.begin(), shard.first.end(), shard.first.begin());
  }
}

// Behind the key, at `hits` of the places where it stands and something follows, evenly spread over the sorted ones.
std::vector<Shards::Place> Shards::places(const uint32_t *key, int n, int hits) const {
  std::vector<std::pair<int64_t, int64_t>> spans;
  int64_t total = 0, before = 0, next = 0;
  for (const Shard &shard : shards) {
    const int64_t first = bound(shard, key, n, 0, false), last = bound(shard, key, n, first, true);
    spans.push_back({first, last});
    total += last - first;
  }
  const int64_t picks = std::min(total, int64_t(hits));
  std::vector<Place> found;
  for (size_t s = 0; s < shards.size(); s++) {
    const auto [first, last] = spans[s];
    for (; next < picks && next * total / picks < before + last - first; next++) {
      found.push_back({&shards[s], int64_t(shards[s].order[first + next * total / picks - before]) + n});
      if (found.back().at < shards[s].size) __builtin_prefetch(shards[s].ids + found.back().at);
    }
    before += last - first;
  }
  return found;
}

Shards::Guess Shards::guess(const std::vector<uint32_t> &context, int least, int length, int hits, int k,
                            bool tree) const {
  const uint32_t *end = context.data() + context.size();
  const auto known = [&](int n) {
    for (const Shard &shard : shards) {
      const int64_t at = bound(shard, end - n, n, 0, false);
      if (at == shard.size) continue;
      const int64_t place = shard.order[at];
      int i = 0;
      while (i < n && token(shard, place + i) == (end - n)[i]) i++;
      if (i == n && token(shard, place + n) != kSeparator) return true;
    }
    return false;
  };
  // If a suffix stands before something, so do the shorter ones; most that do are short, and each look waits for memory.
  int low = least - 1, high = int(context.size()), step = 1;
  while (low < high) {
    const int n = std::min(low + step, high);
    if (known(n)) low = n, step *= 2;
    else high = n - 1, step = std::max(1, step / 2);
  }
  Guess guess;
  if (low < least) return guess;
  const std::vector<Place> places = this->places(end - low, low, hits);

  // A trie of what follows: how many places lead to a node, its depth, its first child and its next sibling.
  struct Node {
    int32_t token, parent, count, depth, child, sibling;
  };
  std::vector<Node> nodes{{0, -1, int32_t(places.size()), 0, -1, -1}};
  nodes.reserve(1 + places.size() * length);
  for (const Place &place : places) {
    int at = 0;
    for (int i = 0; i < length; i++) {
      const uint32_t id = token(*place.shard, place.at + i);
      if (id == kSeparator) break;
      int child = nodes[at].child;
      while (child >= 0 && nodes[child].token != int32_t(id)) child = nodes[child].sibling;
      if (child < 0) {
        child = int(nodes.size());
        nodes.push_back({int32_t(id), at, 0, nodes[at].depth + 1, -1, nodes[at].child});
        nodes[at].child = child;
      }
      nodes[child].count++;
      at = child;
    }
  }
  std::vector<int> picked;
  if (tree) {  // the most frequent beginnings, short ones first: a parent counts no less than its children
    picked.resize(nodes.size() - 1);
    std::iota(picked.begin(), picked.end(), 1);
    std::stable_sort(picked.begin(), picked.end(), [&](int a, int b) {
      return nodes[a].count != nodes[b].count ? nodes[a].count > nodes[b].count : nodes[a].depth < nodes[b].depth;
    });
    if (int(picked.size()) > k) picked.resize(k);
    for (int at : picked) guess.trust.push_back(double(nodes[at].count) / (nodes[nodes[at].parent].count + kUnmet));
  } else {
    for (int at = 0; int(picked.size()) < k;) {
      int best = -1, going = 0;  // the first of the most frequent; siblings stand the last one first
      for (int child = nodes[at].child; child >= 0; child = nodes[child].sibling) {
        if (best < 0 || nodes[child].count >= nodes[best].count) best = child;
        going += nodes[child].count;
      }
      if (best < 0) break;
      guess.trust.push_back(double(nodes[best].count) / (going + kUnmet));
      picked.push_back(at = best);
    }
  }
  std::vector<int32_t> number(nodes.size(), -1);
  for (int at : picked) {
    number[at] = int32_t(guess.tokens.size());
    guess.trust[number[at]] *= 1 - 1 / double(low + nodes[at].depth);  // less, the fewer tokens match before it
    guess.tokens.push_back(nodes[at].token);
    guess.parents.push_back(number[nodes[at].parent]);
  }
  return guess;
}
