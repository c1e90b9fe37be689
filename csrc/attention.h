// Attention of the new rows of several sequences over their cached keys; see attention.cpp.
#pragma once

#include <cstdint>

#include "type.h"

constexpr int kPage = 32;  // slots that lie together wherever they lie

// One sequence: slots [0, start) of the store are its prefix, [start, start + n) the new rows. The store is in one piece,
// or in pages: those of slots [i * kPage, (i + 1) * kPage) are number table[i], counted through all the slabs.
struct AttentionJob {
  const void *q;               // (n, heads, dim)
  const void *keys, *values;   // (n, kv_heads, dim), to be stored first; null if they are there already
  void *out;                   // (n, heads, dim)
  void *store;                 // (2, kv_heads, capacity, dim): keys, values; null if there is a table
  int64_t capacity, start, n;
  const int32_t *parents;  // null for a run of tokens; else per row the row before it, -1 = the prefix
  void *const *slabs;      // each as the store in one piece; their capacity is a multiple of kPage
  const int32_t *table;    // null if there are no pages
  int64_t first = 0;       // rows before it are stored, and get no output

  struct Place {
    char *store;
    int64_t slot;
  };
  Place place(int64_t slot) const {
    if (!table) return {static_cast<char *>(store), slot};
    const uint32_t page = table[slot / kPage], pages = uint32_t(capacity) / kPage;  // short numbers divide fast
    return {static_cast<char *>(slabs[page / pages]), int64_t(page % pages) * kPage + slot % kPage};
  }
};

struct AttentionShape {
  int heads, kv_heads, dim;  // dim is a multiple of 8
  int64_t q_stride, k_stride, v_stride;  // between rows, in elements
  int64_t window;  // a row sees this many positions, itself included; 0 = all
  float scale;
  float softcap;      // c: scores become c * tanh(score / c); 0 = none
  const float *sinks; // (heads): of each, the score of a key without a value that all rows see; null = none
  Type type;  // f32, bf16 or f16
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
