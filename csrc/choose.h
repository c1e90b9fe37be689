// What guesses are worth, and which of them get rows (src/outrider/control.py, whose Beliefs does the same).
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <vector>

class Beliefs {
 public:
  using Ints = std::vector<int32_t>;
  using Reals = std::vector<double>;
  using Guess = std::tuple<uint64_t, Ints, Ints, Reals>;  // whose it is (a bit), tokens, parents, trust
  using Picked = std::tuple<Ints, Ints, Ints, double>;    // tokens, parents, whose each is (number), expected tokens

  // Sources of `apart` (bits) are also judged by themselves.
  explicit Beliefs(uint64_t apart) : apart(apart) {}

  // How many sequences something is kept of.
  int size() const { return int(own.size()); }
  // Per sequence which of its guesses to verify, and the tokens a second that are expected with them.
  std::tuple<std::vector<Picked>, double> choose(const std::vector<int64_t> &seqs, const std::vector<int64_t> &lengths,
                                                 const std::vector<std::vector<Guess>> &guesses, const Reals &covers,
                                                 const Reals &seconds, double drafted, const Ints &most,
                                                 bool chains);
  // From which place on a sequence's text is to be judged; -1: nothing is.
  int64_t waits(int64_t seq) const;
  // Compare guesses for a sequence with the tokens that stand in its text from place `first` on.
  void judge(int64_t seq, int64_t first, const Ints &tokens);
  // The chance of a source apart to be right at each depth, if it is asked.
  Reals hopes(int64_t seq, uint64_t source, int deep, double prior);
  // Drop what is known of this sequence alone.
  void forget(int64_t seq) { own.erase(seq); }

 private:
  struct Kind {
    uint64_t who, otherwise;  // bits
    int sure, deep;
    bool operator==(const Kind &k) const {
      return who == k.who && otherwise == k.otherwise && sure == k.sure && deep == k.deep;
    }
  };
  struct Hash {
    std::size_t operator()(const Kind &k) const {
      uint64_t h = (k.who * 0x9E3779B97F4A7C15) ^ (k.otherwise * 0xBF58476D1CE4E5B9) ^ uint64_t(32 * k.deep + k.sure);
      return std::size_t(h ^ (h >> 29));
    }
  };
  struct Count {
    double right = 0, made = 0;
  };
  struct Bush {
    Ints tokens, parents, depths, kinds;
    std::vector<uint64_t> who;  // the sources that guess it: bits
    Reals trust;                // of the first of them
    int64_t at = 0;             // the place in the text where the next token is compared
    uint64_t source = 0;        // whose guess it is, if it is one's alone; else 0
    int node = -1, depth = 1;   // reached so far, when it is compared
  };
  struct Own {
    std::vector<Count> counts;  // by number of the kind
    std::vector<Bush> probes;   // of sources apart; of source 0: all together
    Bush bush;                  // of the step under way
  };

  void enter(Bush &bush, const Guess &guess, std::vector<int> &at) const;
  int number(const Kind &kind);
  double of(const Own &known, int kind, double prior) const;
  void learn(Own &known, int kind, bool right);
  bool judge(Own &known, Bush &probe, int64_t first, const Ints &tokens);

  uint64_t apart;
  std::unordered_map<Kind, int, Hash> numbers;
  std::vector<Count> all;  // by number of the kind
  std::unordered_map<int64_t, Own> own;
};
