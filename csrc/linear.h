// x W^T for weights packed in panels of 32 outputs.
//
// A panel holds its 32 outputs for all k, so a product reads memory from one end to the other:
//   f32   [k][32]          float
//   f16   [k][32]          float16
//   bf16  [k / 2][32][2]   bfloat16: two neighbouring k side by side, as the dot-product instructions want them
//   int8  [k / 2][2][2][16]  of each half of the outputs the even and the odd k; for rounded activations
//         [k / 4][32][4], four k side by side in the order 0, 2, 1, 3, as the nibbles below have them
//   int4  [k / 4][16][2]   16-bit words, of 4 nibbles each: bits 4j .. 4j + 3 hold, for j = 2 a + b, the weight of
//                          output 16 b + (word / 2) at k + 2 a + (word % 2); a nibble is the weight + 8
//   uint4 the same, a nibble is the weight
//   uint5 [k / 4]          the nibbles of the lower bits, as 64 bytes of uint4, then 4 numbers of 32 bits: bit `word` of
//                          number j is the fifth bit of what nibble j of that word has
//   int6  [k / 4]          of weight + 32, the nibbles, then 32 bytes: bits 2j, 2j + 1 of byte `word` are the upper bits
//   fp4   as uint4, a nibble is a sign (8) and one of kE2M1
//   fp8   [k / 2][32][2]   E4M3 as OCP has it, without infinities; NaN is none of the weights
// K is padded with zeros to a multiple of 32 and outputs to a multiple of 32. A quantised weight is q * scale + offset
// with a scale and, unless it is symmetric, an offset per output and group of k; see Factors.
// With `place` the packed weights stand in another order than the inputs, so that those of a group are neighbours.
#pragma once

#include <cstddef>
#include <cstdint>

#include "type.h"

enum Format { kF32, kBF16, kI8, kI4, kU4, kU5, kI6, kFp4, kFp8, kF16 };

constexpr int kPanel = 32;   // outputs
constexpr int kDepth = 32;   // k is padded to a multiple of this
constexpr int kSuper = 256;  // k that share a coarse factor
constexpr int kE2M1[8] = {0, 1, 2, 3, 4, 6, 8, 12};  // twice the numbers of E2M1

// Scales or offsets [panel][k / group][32]: bfloat16, float16, float, or int8 times a coarse float16
// [panel][k / kSuper][32]. Offsets may be zeros, int8: each times its scale is taken away.
struct Factors {
  enum Kind { kBfloat, kHalf, kCoarse, kFloat, kZeros } kind;
  const void *each;  // null: there are none
  const f16 *coarse;
};

struct Weights {
  Format format;
  int outputs, inputs;  // with `gated`, outputs counts gates and ups together
  int group;            // of the quantised formats: 16, 32, 64 or 128
  bool gated;           // a panel has 16 gates and their 16 ups: the product gives silu(gate) * up
  const void *data;
  Factors scales, offsets;
  const void *bias;     // null, or of the type of the activations
  const int32_t *place; // null, or where each input stands among the packed k
  bool rounded = false; // whether rows are rounded to 8 bits, group by group, and products are of integers

  int padded() const { return (inputs + kDepth - 1) / kDepth * kDepth; }
  int groups() const { return (padded() + group - 1) / group; }
  int supers() const { return (padded() + kSuper - 1) / kSuper; }
  int panels() const {
    return gated ? (outputs / 2 + kPanel / 2 - 1) / (kPanel / 2) : (outputs + kPanel - 1) / kPanel;
  }
  int width() const { return gated ? outputs / 2 : outputs; }  // of the result
  int bits() const {
    static constexpr int kBits[] = {32, 16, 8, 4, 4, 5, 6, 4, 8, 16};
    return kBits[format];
  }
  // Whether products of integers are made of this format.
  bool integers() const { return format == kI8 || format == kI4 || format == kU4 || format == kU5 || format == kI6; }
  // Where in a panel the int8 weight of place i stands.
  size_t byte_at(int i, int k) const {
    if (rounded) return size_t(k / 4) * 4 * kPanel + 4 * i + k % 2 * 2 + k % 4 / 2;
    return size_t(k / 2) * 2 * kPanel + i / 16 * 32 + k % 2 * 16 + i % 16;
  }
  int64_t panel_bytes() const { return int64_t(padded()) * kPanel * bits() / 8; }
  int step() const { return gated ? kPanel / 2 : kPanel; }  // outputs of a panel
  // The output that lies at place i of a panel, -1 if none does.
  int output(int panel, int i) const {
    if (!gated) return panel * kPanel + i < outputs ? panel * kPanel + i : -1;
    const int at = panel * (kPanel / 2) + i % (kPanel / 2);
    return at >= outputs / 2 ? -1 : i < kPanel / 2 ? at : outputs / 2 + at;
  }
};

// Activations are float for f32 weights, float16 for f16, and bfloat16 for all others.
struct LinearKernels {
  // y (rows, width) = norm(x) W^T + bias + residual. x (rows, inputs); y of the type of the activations, or float;
  // residual (rows, width) in theirs, may be null and may be y; rows of both lie `stride` apart. `norm` (inputs), if not
  // null, scales x by its root mean square first: x / sqrt(mean(x^2) + eps) * norm.
  void (*linear)(const Weights &w, const void *x, int rows, void *y, int stride, bool y_float, const void *residual,
                 const void *norm, float eps, int threads);
  // Reads `bytes` of memory from one end to the other, as fast as it comes, and returns a sum that means nothing.
  float (*stream)(const void *memory, int64_t bytes, int threads);
};

// Packs plain weights (outputs, inputs), row by row: float, float16 or bfloat16 as the format says, and int8 values for the
// quantised formats, within their bits. The second function packs factors (outputs, count), of `size` bytes each.
void pack_weights(const Weights &w, const void *plain, void *packed, int threads);
void pack_factors(const Weights &w, const void *plain, int count, int size, void *packed, int threads);
// The panels [first, last) of some weights; of gated ones only if they have no bias.
Weights part_of(const Weights &w, int first, int last);
// The weights of one output (inputs), as activations are stored: what the packed ones stand for, rounded once. Not of
// gated weights.
void unpack_row(const Weights &w, int output, void *to);

// Whether no number is NaN or infinite.
bool all_finite(const void *numbers, int64_t count, Type type, int threads);

#ifdef OUTRIDER_ISA
namespace OUTRIDER_ISA {
extern const LinearKernels linear_kernels;
}
#endif
