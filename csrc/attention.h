// Attention of the new rows of several sequences over their cached keys; see attention.cpp.
#pragma once

#include <cstdint>

enum class Type : int { f32, bf16, int8 };

// One sequence: slots [0, start) of the store are its prefix, [start, start + n) the new rows.
struct AttentionJob {
  const void *q;               // (n, heads, dim)
  const void *keys, *values;   // (n, kv_heads, dim), to be stored first; null if they are there already
  void *out;                   // (n, heads, dim)
  void *store;                 // (2, kv_heads, capacity, dim): keys, values
  const float *scales;         // (2, kv_heads, capacity) if the store is int8
  int64_t capacity, start, n;
  const int32_t *parents;  // null for a run of tokens; else per row the row before it, -1 = the prefix
};

struct AttentionShape {
  int heads, kv_heads, dim;  // dim is a multiple of 8
  int64_t q_stride, k_stride, v_stride;  // between rows, in elements
  int64_t window;  // a row sees this many positions, itself included; 0 = all
  float scale;
  Type q_type, store_type;  // q f32 or bf16; the store the same, or int8
  int threads;
};

struct AttentionKernels {
  void (*attend)(const AttentionShape &shape, const AttentionJob *jobs, int count);
};

#ifdef OUTRIDER_ISA
namespace OUTRIDER_ISA {
extern const AttentionKernels attention_kernels;
}
#endif
