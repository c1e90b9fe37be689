// What guesses are worth, and which of them get rows (src/outrider/control.py, whose Beliefs does the same).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

class Beliefs {
 public:
  using Ints = std::vector<int32_t>;
  using Reals = std::vector<double>;
  using Guess = std::tuple<uint64_t, Ints, Ints, Reals>;  // whose it is (a bit), tokens, parents, trust
  using Picked = std::tuple<Ints, Ints, Ints, double>;    // tokens, parents, whose each is (number), expected tokens

  struct Text {
    int64_t seq, length, room;  // its id, its tokens, and how many may yet come
    std::vector<Guess> guesses;
  };
  struct Model {  // a source that runs one, as control.py has it
    uint64_t source;
    int most;
    int64_t least;
    bool timed;
    double reading, riders;
    bool tree;
    Reals rounds;
  };
  using Asked = std::tuple<int, std::vector<int>, int>;  // a model's number, for which texts, for how many tokens
  struct Came {
    int64_t seq, first;  // its id, and the place in its text of the first of these tokens
    Ints tokens;
    int accepted;
  };

  // Sources of `apart` (bits) are also judged by themselves.
  explicit Beliefs(uint64_t apart) : apart(apart) {}

  // How many sequences something is kept of.
  int size() const { return int(own.size()); }
  // From now on a forward with no node, with one, and so on takes so long.
  void price(Reals now) { seconds = std::move(now); }
  // What look-ups found for a sequence in the step under way.
  std::vector<Guess> &looked(int64_t seq) { return own.at(seq).looked; }
  // How many nodes have a price.
  int most() const { return int(seconds.size()) - 1; }
  // A step begins for a sequence.
  void begin(int64_t seq, int64_t room);
  // Whether cheap sources are to be asked for a sequence.
  bool ask(int64_t seq, int64_t room);
  // Per sequence which of its guesses to verify, at most k (k <= most()).
  std::vector<Picked> choose(std::vector<Text> &texts, double drafted, int k, bool chains);
  // Which model to run beside what was just chosen, if any pays; the texts' guesses do not matter.
  std::optional<Asked> worth(const std::vector<Text> &texts, int k, const std::vector<Model> &models);
  // A model was run for a sequence in the step under way, and its draft has riders. The tokens it had not read.
  int64_t ran(int64_t seq, uint64_t source, int riders, int64_t length);
  // A sequence's steps, and what is left to run models for it, in plain steps.
  std::tuple<int, double> standing(int64_t seq) const { return {own.at(seq).steps, own.at(seq).asks.credit}; }
  // So many steps are over: who was drafted for pays, and guesses are compared with what came.
  void settle(const std::vector<Came> &came, int rows, double took, double drafted, int steps);
  // From which place on a sequence's text is to be judged; -1: nothing is.
  int64_t waits(int64_t seq) const;
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
  struct Account {
    double start, credit;
    explicit Account(int64_t room = 0);
    double covers() const;
    double stake() const { return credit + 0.5 * start; }
    void enter(double brought, double cost);
  };
  struct Count {
    double right = 0, made = 0;
  };
  struct Says {
    int parent;
    uint64_t source;
    double best;
  };
  struct Bush {
    Ints tokens, parents, depths, kinds;
    std::vector<uint64_t> who;  // the sources that guess it: bits
    Reals trust;                // of who trusts it most
    std::vector<Says> says;     // how sure each source is of its best guess behind a node
    int64_t at = 0;             // the place in the text where the next token is compared
    uint64_t source = 0;        // whose guess it is, if it is one's alone; else 0
    int node = -1, depth = 1;   // reached so far, when it is compared
  };
  struct Read {  // the step in which a model was run last, and the tokens it has read
    uint64_t source;
    int step;
    int64_t tokens;
  };
  struct Own {
    Account rows, asks;         // of steps in which no model was run to draft, and of the others
    std::vector<Guess> looked;  // in the step under way
    std::vector<Read> read;
    int steps = 0, ran = 0;     // ran: a model's run and riders, in the step under way; nodes: these, and its rows
    int nodes = 0;
    double worth = 0, hoped = 0;  // tokens that its draft is expected to bring; by what is believed of their kinds alone
    std::vector<Count> counts;  // by number of the kind
    std::vector<Bush> probes;   // of sources apart; of source 0: all together
    Bush bush;                  // of the step under way

    explicit Own(int64_t room = 0) : rows(room), asks(room) {}
    Read last(uint64_t source) const {
      for (const Read &each : read)
        if (each.source == source) return each;
      return {source, 0, 0};
    }
  };

  void enter(Bush &bush, const Guess &guess, int64_t deepest, std::vector<int> &at) const;
  int number(const Kind &kind);
  double of(const Own &known, int kind, double prior) const;
  double faith() const;
  void learn(Own &known, int kind, bool right);
  void judge(Own &known, const Came &came);
  bool judge(Own &known, Bush &probe, int64_t first, const Ints &tokens);

  uint64_t apart;
  Reals seconds;
  double rate = 0;  // tokens a second that are expected of what was chosen
  std::unordered_map<Kind, int, Hash> numbers;
  std::vector<Count> all;  // by number of the kind
  Count drafts;            // tokens of what was drafted: right, and hoped for
  std::unordered_map<int64_t, Own> own;
};
