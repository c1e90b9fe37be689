#include "suffix.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "lookups.h"

namespace {

constexpr int32_t kEnd = -1;  // stands behind each earlier output
constexpr size_t kNowhere = SIZE_MAX;

uint64_t hash(const int32_t *tokens, int size) {
  uint64_t h = kEmpty;
  for (int i = 0; i < size; i++) h = longer(h, tokens[i]);
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
      __builtin_prefetch(&text[at]);  // compared below: all of them wait for memory together
      found.push_back({int(at), 0});
      at = back[i][at] ? at - back[i][at] : -1;
    }
  }
  std::sort(found.begin(), found.end(), [](const Place &a, const Place &b) { return a.at > b.at; });
  found.erase(std::unique(found.begin(), found.end(), [](const Place &a, const Place &b) { return a.at == b.at; }),
              found.end());
  for (Place &place : found)
    while (place.match < std::min(place.at, length) && text[place.at - 1 - place.match] == tail[length - 1 - place.match])
      place.match++;
  found.erase(std::remove_if(found.begin(), found.end(), [](const Place &place) { return !place.match; }), found.end());
}

// What follows places (the most recent first): the likeliest paths come first, none below `least`.
SuffixIndex::Guess SuffixIndex::follow(const std::vector<int> &places, int match, int size, double least,
                                       int width) const {
  struct Way {
    double cost;  // minus the path's probability
    int depth, token, node;
    double trust;
    size_t first, last;  // of the places behind it, in `behind`
  };
  struct Child {
    int32_t token;
    int count;
    size_t next;  // where in `behind` its next place goes; kNowhere if it is not followed
  };
  // Kept from call to call: new memory is cold memory.
  static thread_local std::vector<Way> ways;
  static thread_local std::vector<int> heap, behind, whose, order, path;
  static thread_local std::vector<Child> after;
  Guess g;
  behind.assign(places.begin(), places.end());
  ways.assign(1, {-1, 0, kEnd, -1, 0, 0, places.size()});
  heap.assign(1, 0);
  const auto later = [](int a, int b) { return ways[a].cost != ways[b].cost ? ways[a].cost > ways[b].cost : a > b; };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Way way = ways[heap.back()];
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
    whose.clear();
    int total = 0;
    for (size_t i = way.first; i < way.last; i++) {
      const int beyond = behind[i] - this->size();  // a copy that reaches the end goes on into itself
      const int32_t token = beyond < 0 ? text[behind[i]] : path[path.size() - 1 - beyond];
      int child = token == kEnd ? -1 : 0;
      while (child >= 0 && child < int(after.size()) && after[child].token != token) child++;
      if (child == int(after.size())) after.push_back({token, 0, kNowhere});
      whose.push_back(child);
      if (child < 0) continue;
      after[child].count++;
      total++;
    }
    order.resize(after.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [](int a, int b) {
      return after[a].count != after[b].count ? after[a].count > after[b].count : a < b;
    });
    const double sure = 1 - 1 / double(1 + match + way.depth);
    size_t end = behind.size();
    for (int i = 0; i < std::min(width, int(order.size())); i++) {
      Child &child = after[order[i]];
      const double share = double(child.count) / total;
      if (-way.cost * share < least) continue;
      ways.push_back({way.cost * share, way.depth + 1, child.token, node, share * sure, end, end + child.count});
      heap.push_back(int(ways.size()) - 1);
      std::push_heap(heap.begin(), heap.end(), later);
      child.next = end;
      end += child.count;
    }
    behind.resize(end);
    for (size_t i = way.first; i < way.last; i++)
      if (const int child = whose[i - way.first]; child >= 0 && after[child].next != kNowhere)
        behind[after[child].next++] = behind[i] + 1;
  }
  return g;
}

SuffixIndex::Guess SuffixIndex::guess(const SuffixIndex &past, const std::vector<int32_t> &beyond, int depth, int k,
                                      double factor, double least, int width) {
  const size_t settled = text.size();
  text.insert(text.end(), beyond.begin(), beyond.end());
  const int length = std::min(depth, size());
  Guess best;
  static thread_local std::vector<Place> found;
  static thread_local std::vector<int> matches, places;
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
