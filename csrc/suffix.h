// A text in which suffix decoding looks for its own end (src/outrider/drafters/suffix.py, whose Index does the same).
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

class SuffixIndex {
 public:
  struct Guess {
    double worth = 0;
    std::vector<int32_t> tokens, parents;
    std::vector<double> trust;
  };

  // Append tokens. N-grams reach back into what stands before them unless they are `apart`.
  void enter(const std::vector<int32_t> &tokens, bool apart = false);
  // Take the first tokens out.
  void drop(int length);
  // What is expected behind this text and `beyond`, by this text or by `past`.
  Guess guess(const SuffixIndex &past, const std::vector<int32_t> &beyond, int depth, int k, double factor, double least,
              int width);
  // k tokens, each of them what followed the longest n-gram before it the last time, in this text or else in `past`.
  Guess chain(const SuffixIndex &past, const std::vector<int32_t> &beyond, int k);
  int size() const { return int(text.size()); }

 private:
  static constexpr int kSizes[] = {8, 4, 2, 1}, kCounts = 4, kFollowed = 64;
  struct Place {
    int at, match;
  };

  void search(const int32_t *tail, int length, std::vector<Place> &found) const;
  int32_t next(const std::vector<int32_t> &tail, int i) const;
  Guess follow(const std::vector<int> &places, int match, int size, double least, int width) const;

  std::vector<int32_t> text;
  std::unordered_map<uint64_t, int64_t> last[kCounts];  // hash of an n-gram -> place after its last occurrence
  std::vector<int32_t> back[kCounts];                   // per place, how far back the one before it is; 0 = none
  int64_t base = 0;                                     // the place of the first token
};
