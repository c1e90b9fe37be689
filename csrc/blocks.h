#pragma once

#include <cstdint>

// Kinds of blocks in GGUF files, by their bytes.
enum class Blocks { kQ8_0 = 34, kQ4_0 = 18, kQ4_1 = 20, kQ4_K = 144, kQ5_K = 176, kQ6_K = 210, kMXFP4 = 17 };

// Numbers of `count` blocks, (count, 32 or 256; twice those of MXFP4), and, of K-quants, their scales (count, 8, or 16
// of Q6_K) and minima (count, 8; not of Q6_K). Throws std::invalid_argument for another kind.
void take_apart(Blocks kind, const uint8_t *blocks, int64_t count, int8_t *values, int8_t *scales, int8_t *minima, int threads);
