// One forward of a decoder in one call: from tokens to logits, with no Python between the layers. It calls the same
// kernels with the same numbers as model.py does layer by layer, so that it has the same bits.
#pragma once

#include <utility>
#include <vector>

#include "experts.h"
#include "sampling.h"

struct WalkLayer {
  const void *input_norm, *post_norm, *q_norm, *k_norm, *attention_norm, *mlp_norm;  // each may be null
  Product qkv, o, gate_up, down;  // of the MLP, or
  const Mixture *experts;         // ... null
  int64_t window;                 // as in AttentionShape
  const float *sinks;
  int turn;  // which of the plan's rotations
};

// A decoder: addresses of memory that its maker keeps alive.
struct Walk {
  int heads, kv_heads, dim, hidden, vocab;
  float eps, scale, softcap;
  bool full_norms;          // q_norm and k_norm are of all heads in one, (heads * dim) and (kv_heads * dim)
  Gate gate;                // unless gate_up are gated weights
  float residual;           // by which what attention and MLP add is multiplied
  Type type;                // of activations, keys and values: f32, bf16 or f16
  const void *embedding;    // (vocab, hidden) of that type, or
  const Weights *packed;    // ... its rows are these weights', or neither: rows come embedded
  const void *beside_norm;  // null, or qkv sees 2 * hidden: what stands beside each row, normed by this, and the row, normed
  bool normed;              // whether what attention adds to is then the normed row
  std::vector<WalkLayer> layers;
  const void *norm;
  Product head;
};

// One sequence's rows [row, row + n); see AttentionJob. It has a table, or the stores.
struct WalkRun {
  int64_t row, n, start, capacity;
  bool tree;
  std::vector<int32_t> parents;
  std::vector<uintptr_t> stores;  // of each layer
  const int32_t *table;
};

struct WalkPlan {
  int rows;
  std::vector<int64_t> tokens;   // none if the rows come embedded
  const void *embedded;          // (rows, hidden)
  const void *beside;            // (rows, hidden), if there is a norm for it
  std::vector<uintptr_t> turns;  // (rotations, rows) cosines (dim); the sines lie `sines` bytes behind
  int64_t sines;
  std::vector<WalkRun> runs;
  void *const *slabs;                                 // (layers, slab_count), if runs have tables
  int64_t slab_count;
  std::vector<int> wanted;                            // rows that are asked for
  std::vector<std::pair<int, uintptr_t>> states;      // point: where (rows, hidden) go; -1 is behind the final norm
  void *queries;                                      // (layers, rows, heads, dim), or null
  void *out;                                          // (wanted, hidden), normed
  float *logits;                                      // (wanted, vocab), or null
  std::vector<Draw> draws;                            // of each row of logits, its logits aside; or none
  int *best;                                          // of each row what `draw` says, or at temperature 0, or without draws, `argmax`
  int threads;
};

// Throws std::bad_alloc; std::out_of_range, before anything is stored, for a token that is none.
void walk(const Walk &w, const WalkPlan &plan);
