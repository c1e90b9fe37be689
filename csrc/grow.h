// Trees of a recurrent head's guesses (src/outrider/drafters/recurrent.py), all levels in one call. They are those that
// trees.py grows from the same products, node for node.
#pragma once

#include <vector>

#include "linear.h"
#include "sampling.h"
#include "type.h"

// state + down(silu(gate x) * up x), x = [norm(token), state]; addresses of memory that its maker keeps alive.
struct Recurrence {
  int hidden, words, vocab;  // `words` of a draft vocabulary
  float eps;
  Type type;                 // of states and embeddings
  const void *embedding;     // (vocab, hidden), or
  const Weights *packed;     // ... its rows are these weights'
  const void *norm;          // (hidden)
  const Weights *gate_up, *down, *projection;
  const int64_t *ids;        // (words), the target's
};

// What a tree grows from: the target's state (hidden), the token that was chosen from it, and how one level's guesses are
// shaped; `keys` are of the noise of each level, as many as there are levels.
struct GrowRoot {
  const void *state;
  int64_t token;
  Draw shape;
  std::vector<uint64_t> keys;
};

struct Grown {
  std::vector<int64_t> tokens;
  std::vector<int> parents;
  std::vector<double> trust;  // of each node, its share among its siblings
};

// Behind each node `width` candidates at most, none whose path is less likely than exp(least); of the k likeliest the
// last level's are gone on from. The k likeliest, the likeliest child first.
std::vector<Grown> grow(const Recurrence &head, const std::vector<GrowRoot> &roots, int k, int width, double least, int threads);
