// Law 1's choice of a token by temperature, top-k, top-p and min-p (src/outrider/sampling.py), where it is beyond doubt.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

struct Draw {
  const float *logits;  // (vocab)
  float temperature;    // above 0
  int top_k;            // 0: all
  double top_p;         // 1: all
  float least;          // the smallest shaped logit that min-p keeps
  uint64_t key;         // of the noise
};

constexpr int kUnsure = -1;

// The `count` likeliest places, the best first, of what Law 1 would choose from, and the logarithm of each one's share of
// that, as far as a guess needs it: by logits alone if the temperature is 0, else shaped, and with the noise of the place,
// which has token ids[i] at place i. None if the logits are not finite.
std::vector<std::pair<int, float>> guess(const Draw &d, int vocab, const int64_t *ids, int count);

// The token that sampling.py chooses, or kUnsure: logits are not finite, or what they decide is closer than the last bits
// of different libraries' functions.
int draw(const Draw &d, int vocab);
