// An MLP of experts: each row goes through those that a router chooses for it, and each of these is read once for all of
// its rows. What a row gets does not depend on which rows share its experts: products are row-invariant, and a row sums
// what its experts give in their order.
#pragma once

#include <atomic>
#include <vector>

#include "kernels.h"

using Product = std::vector<const Weights *>;  // with the same inputs; their outputs lie side by side

struct Expert {
  Product gate_up, down;
  int64_t bytes;  // of its weights
};

struct Mixture {
  int hidden, width;             // width: the largest of the experts' inner ones
  Type type;                     // of activations
  Product router;                // hidden -> one score for each expert
  std::vector<Expert> experts;   // the shared one, which all rows take, is the last
  int chosen;                    // experts for each row, beside the shared one
  bool normalised;               // weights are a softmax over the chosen ones, else over all but the shared one
  bool shared;                   // whether there is one; its weight is the sigmoid of its score
  Gate gate;                     // unless gate_up are gated weights
  mutable std::atomic<int64_t> read{0};  // bytes of experts so far
};

// Which experts (`chosen`, and the shared one) a row of `all` scores takes, ascending, and their weights. Of equal scores
// the first wins.
void route(const float *scores, int all, int chosen, bool normalised, bool shared, int *experts, float *weights);

// y (rows, hidden) = residual + what the experts give for norm(x); residual may be null, and y may be x. Throws
// std::bad_alloc.
void mix(const Mixture &m, const void *x, int rows, const void *norm, float eps, const void *residual, void *y, int threads);
