#include "suffix.h"

#include <algorithm>
#include <deque>

namespace {

constexpr int32_t kEnd = -1;  // stands behind each earlier output

uint64_t hash(const int32_t *tokens, int size) {
  uint64_t h = 0x9E3779B97F4A7C15;
  for (int i = 0; i < size; i++) {
    h = (h ^ uint32_t(tokens[i])) * 0xBF58476D1CE4E5B9;
    h ^= h >> 29;
  }
  return h;
}

}  // namespace

void SuffixIndex::enter(const std::vector<int32_t> &tokens, bool apart) {
  const int start = apart ? size() : 0;
  text.insert(text.end(), tokens.begin(), tokens.end());
  for (int i = 0; i < kCounts; i++)
    for (int at = int(back[i].size()); at < size(); at++) {
      int64_t distance = 0;
      if (at - start >= kSizes[i]) {
        int64_t &place = last[i].try_emplace(hash(&text[at - kSizes[i]], kSizes[i]), base + at).first->second;
        distance = base + at - place;
        place = base + at;
      }
      back[i].push_back(int32_t(distance));
    }
}

void SuffixIndex::drop(int length) {
  for (int i = 0; i < kCounts; i++) {
    for (int at = kSizes[i]; at < length; at++) {
      const auto found = last[i].find(hash(&text[at - kSizes[i]], kSizes[i]));
      if (found != last[i].end() && found->second == base + at) last[i].erase(found);
    }
    back[i].erase(back[i].begin(), back[i].begin() + length);
  }
  text.erase(text.begin(), text.begin() + length);
  base += length;
}

// Places behind occurrences of the end of a tail, each once, and how many tokens match there.
void SuffixIndex::search(const int32_t *tail, int length, std::vector<Place> &found) const {
  found.clear();
  for (int i = 0; i < kCounts; i++) {
    if (kSizes[i] > length) continue;
    const auto first = last[i].find(hash(tail + length - kSizes[i], kSizes[i]));
    int64_t at = first == last[i].end() ? -1 : first->second - base;
    for (int j = 0; j < kFollowed && at >= 0; j++) {
      int n = 0;
      while (n < at && n < length && text[at - 1 - n] == tail[length - 1 - n]) n++;
      if (n) found.push_back({int(at), n});
      at = back[i][at] ? at - back[i][at] : -1;
    }
  }
  std::sort(found.begin(), found.end(), [](const Place &a, const Place &b) { return a.at > b.at; });
  found.erase(std::unique(found.begin(), found.end(), [](const Place &a, const Place &b) { return a.at == b.at; }),
              found.end());
}

// What follows places (the most recent first): the likeliest paths come first, none below `least`.
SuffixIndex::Guess SuffixIndex::follow(std::vector<int> places, int match, int size, double least, int width) const {
  struct Way {
    double cost;  // minus the path's probability
    int order, depth, token, node;
    double trust;
    std::vector<int> places;
  };
  Guess g;
  std::deque<Way> ways{{-1, 0, 0, kEnd, -1, 0, std::move(places)}};
  std::vector<Way *> heap{&ways[0]};
  const auto later = [](const Way *a, const Way *b) {
    return a->cost != b->cost ? a->cost > b->cost : a->order > b->order;
  };
  std::vector<std::pair<int32_t, std::vector<int>>> after;
  std::vector<int32_t> path;
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Way &way = *heap.back();
    heap.pop_back();
    int node = -1;
    if (way.depth) {
      g.worth -= way.cost;
      g.tokens.push_back(way.token);
      g.parents.push_back(way.node);
      g.trust.push_back(way.trust);
      node = int(g.tokens.size()) - 1;
    }
    if (int(g.tokens.size()) == size) break;
    path.clear();
    for (int up = node; up >= 0; up = g.parents[up]) path.push_back(g.tokens[up]);
    after.clear();
    int total = 0;
    for (int at : way.places) {
      const int beyond = at - this->size();  // a copy that reaches the end goes on into itself
      const int32_t token = beyond < 0 ? text[at] : path[path.size() - 1 - beyond];
      if (token == kEnd) continue;
      auto it = std::find_if(after.begin(), after.end(), [&](const auto &a) { return a.first == token; });
      if (it == after.end()) it = after.insert(it, {token, {}});
      it->second.push_back(at + 1);
      total++;
    }
    std::stable_sort(after.begin(), after.end(),
                     [](const auto &a, const auto &b) { return a.second.size() > b.second.size(); });
    const double sure = 1 - 1 / double(1 + match + way.depth);
    for (int i = 0; i < std::min(width, int(after.size())); i++) {
      const double share = double(after[i].second.size()) / total;
      if (-way.cost * share < least) continue;
      ways.push_back({way.cost * share, int(ways.size()), way.depth + 1, after[i].first, node, share * sure,
                      std::move(after[i].second)});
      heap.push_back(&ways.back());
      std::push_heap(heap.begin(), heap.end(), later);
    }
  }
  return g;
}

SuffixIndex::Guess SuffixIndex::guess(const SuffixIndex &past, const std::vector<int32_t> &beyond, int depth, int k,
                                      double factor, double least, int width) {
  const size_t settled = text.size();
  text.insert(text.end(), beyond.begin(), beyond.end());
  const int length = std::min(depth, size());
  Guess best;
  std::vector<Place> found;
  std::vector<int> matches, places;
  for (const SuffixIndex *where : {static_cast<const SuffixIndex *>(this), &past}) {
    where->search(text.data() + text.size() - length, length, found);
    matches.clear();
    for (const Place &place : found) matches.push_back(place.match);
    std::sort(matches.rbegin(), matches.rend());
    matches.erase(std::unique(matches.begin(), matches.end()), matches.end());
    for (int n : matches) {
      const int size = int(std::min(double(k), factor * n + 1e-6));
      if (size <= best.worth) break;  // not even a sure guess of this length would be worth more
      places.clear();
      for (const Place &place : found)
        if (place.match >= n) places.push_back(place.at);
      Guess own = where->follow(places, n, size, least, width);
      if (own.worth > best.worth) best = std::move(own);
    }
  }
  text.resize(settled);
  return best;
}

// What followed the last n-gram of this size the last time; kEnd if nothing did.
int32_t SuffixIndex::next(const std::vector<int32_t> &tail, int i) const {
  if (kSizes[i] > int(tail.size())) return kEnd;
  const auto found = last[i].find(hash(tail.data() + tail.size() - kSizes[i], kSizes[i]));
  return found == last[i].end() ? kEnd : text[found->second - base];
}

SuffixIndex::Guess SuffixIndex::chain(const SuffixIndex &past, const std::vector<int32_t> &beyond, int k) {
  const size_t settled = text.size();
  text.insert(text.end(), beyond.begin(), beyond.end());
  std::vector<int32_t> tail(text.end() - std::min(kSizes[0], size()), text.end());
  Guess g;
  for (int i = 0; i < kCounts && int(g.tokens.size()) < k; i++)
    for (const SuffixIndex *where : {static_cast<const SuffixIndex *>(this), &past}) {
      const int32_t token = where->next(tail, i);
      if (token == kEnd) continue;
      g.parents.push_back(int(g.tokens.size()) - 1);
      g.tokens.push_back(token);
      g.trust.push_back(1 - 1 / double(1 + kSizes[i]));
      tail.push_back(token);
      i = -1;  // the longest first, again
      break;
    }
  text.resize(settled);
  return g;
}
