// Law 1's choice of a token by temperature, top-k, top-p and min-p (src/outrider/sampling.py), where it is beyond doubt.
#pragma once

#include <cstdint>

struct Draw {
  const float *logits;  // (vocab)
  float temperature;    // above 0
  int top_k;            // 0: all
  double top_p;         // 1: all
  float least;          // the smallest shaped logit that min-p keeps
  uint64_t key;         // of the noise
};

constexpr int kUnsure = -1;

// The token that sampling.py chooses, or kUnsure: logits are not finite, or what they decide is closer than the last bits
// of different libraries' functions.
int draw(const Draw &d, int vocab);
