// Look-ups of what followed the same tokens: in a sequence itself, and in a datastore.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

// The hash of an n-gram, one token after the other.
constexpr uint64_t kEmpty = 0x9E3779B97F4A7C15;
inline uint64_t longer(uint64_t hash, int32_t token) {
  hash = (hash ^ uint32_t(token)) * 0xBF58476D1CE4E5B9;
  return hash ^ (hash >> 29);
}

// Prompt lookup (src/outrider/drafters/ngram.py, whose Index does the same).
class NgramIndex {
 public:
  struct Copy {
    std::vector<int32_t> tokens;
    std::vector<double> trust;
  };

  // N-grams of `least` to `most` tokens.
  NgramIndex(int least, int most) : least(least), most(most) {}
  // Append tokens.
  void enter(const std::vector<int32_t> &tokens);
  // What followed the last occurrence of the longest n-gram that ends this text and `beyond`, at most k tokens.
  Copy guess(const std::vector<int32_t> &beyond, int k);
  int size() const { return int(text.size()); }

 private:
  int least, most;
  std::vector<int32_t> text;
  std::unordered_map<uint64_t, int32_t> ends;  // hash of an n-gram -> the place behind its last occurrence
  int upto = 1;                                // ends below this are entered
};

// A datastore's shards (src/outrider/datastore.py), which their maker keeps in memory, and the guesses of method rest
// (src/outrider/drafters/rest.py does the same).
class Shards {
 public:
  struct Shard {
    const uint32_t *ids, *order;  // tokens, big-endian; its suffix array, little-endian
    int64_t size;
    std::vector<uint32_t> first = {};  // by token: where the places that begin with it begin; empty: not known
  };
  struct Guess {
    std::vector<int32_t> tokens, parents;
    std::vector<double> trust;
  };

  // If all may be `read` once, look-ups begin among the places of their first token.
  Shards(std::vector<Shard> shards, bool read);
  // The chain, or tree, of at most k tokens that most often followed the longest known end of `context`, of at least
  // `least` tokens, at `hits` of the places where it stands, `length` tokens of each.
  Guess guess(const std::vector<uint32_t> &context, int least, int length, int hits, int k, bool tree) const;

 private:
  struct Place {
    const Shard *shard;
    int64_t at;
  };
  std::vector<Place> places(const uint32_t *key, int n, int hits) const;

  std::vector<Shard> shards;
};
