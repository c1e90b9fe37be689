// Attention of few rows over many keys. What a row gets depends on its own query, path and position alone (Law 2):
//
// - A row takes its keys in the order of their positions, in aligned blocks of kBlock, block after block with an online
//   softmax; masked keys weigh exactly zero. Inside a block every score is a lane of its own, summed over dim in order,
//   and every output a lane of its own, summed over the keys in order. So it does not matter which rows share a block.
// - The rows of a token tree share the blocks of their common prefix. The blocks behind it are gathered for each along
//   its path: there they hold what plain decoding would find at these positions.
// - Every kSpan positions the sums begin anew; the parts are then combined in order. Spans are what threads share out.
//
// A block's keys are turned once into a tile (dim, keys), its values into a tile (keys, dim), in the order in which the
// products want them, and serve all rows and all query heads of their group. In the bf16 mode a unit is a pair of
// neighbours along the summed dimension, as vdpbf16ps and the AMX tiles take them; the weights are rounded to bf16. With
// AMX, many rows take the keys as they lie.
#include "attention.h"

#include <cstring>
#include <type_traits>

#include "pool.h"
#include "scratch.h"
#include "tiles.h"
#include "vec.h"

namespace OUTRIDER_ISA {
namespace {

constexpr int kBlock = kPage;  // keys
constexpr int kSpan = 1024;   // positions, a multiple of kBlock
constexpr int kRows = 6;      // rows of a register tile
constexpr int kPanel = 48;    // rows whose scores are all taken before they are weighed
constexpr int kChunk = 192;   // rows (of heads) that share a block at most: their sums stay in the second-level cache
constexpr int kTaskSlot = 4, kRunSlot = 5, kShareSlot = 6, kPartSlot = 7;  // of scratch memory
constexpr int kLeast = 4;     // rows (of tokens) that are worth packing a block which others pack, too
constexpr int kAhead = 8192;   // bytes: how far ahead of the packing keys, and values, are asked for
constexpr float kNone = -__builtin_inff();
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kRise = 8;  // of log2 of a weight, before the sums so far are scaled anew: seldom

constexpr bool kNarrow = W <= 8;  // vectors of which a block takes more: fewer lines are asked for beside each

// Vectors of a register tile of R rows: where registers are few, more for few rows, whose sums would wait for each other.
template <int R>
constexpr int kColumns = W == 16 || (W == 8 && R <= 3) ? 4 : 2;

// 2^x, for x <= 0 or little above; 0 below -126.5. Of relative error 2e-9 and two roundings, and 1 at 0; rough, for what
// is rounded to bf16: 8e-5.
template <bool rough>
INLINE vf exp2(vf x) {
  const vf magic = splat(12583039.f);  // 1.5 * 2^23 + 127: adding it rounds to an integer, whose last bits are the
  x = max(splat(-127.f), x);           // exponent as a float has it; NaN stays
  const vf t = x + magic;
  const vf r = x - (t - magic);
  vf y;
  if (rough) {
    y = fma(r, splat(0.05517167f), splat(0.24261113f));
    y = fma(r, y, splat(0.69326097f));
    y = fma(r, y, splat(0.99992806f));
  } else {
    y = fma(r, splat(0.00015345810970757157f), splat(0.0013399930903688073f));
    y = fma(r, y, splat(0.009618489071726799f));
    y = fma(r, y, splat(0.05550328642129898f));
    y = fma(r, y, splat(0.24022646248340607f));
    y = fma(r, y, splat(0.6931471824645996f));
    y = fma(r, y, splat(1.0f));
  }
  return y * (vf)((vi)t << 23);
}

INLINE float exp2(float x) { return exp2<false>(splat(x))[0]; }

INLINE bool any_above(vf x, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)splat(limit), _CMP_GT_OQ);
#endif
  return max(x) > limit;
}

struct Lanes {
  float at[kBlock];
  constexpr Lanes() : at() {
    for (int i = 0; i < kBlock; i++) at[i] = float(i);
  }
};
constexpr Lanes kLanes;

// ---- the two modes: products of floats, also of f16, or of pairs of bf16 ------------------------------------------------------

// Memory that will be wanted, asked for bit by bit while other work is done: a processor drops what it is asked for all
// at once. It is to come to the second-level cache, for which more lines can be on their way than for the first. Without
// a step it is one line again and again, which costs next to nothing.
struct Ahead {
  const char *at;
  int step;

  void ask(int lines) {
    for (int i = 0; i < lines; i++, at += step) __builtin_prefetch(at, 0, 2);
  }
};

struct Single {
  typedef float Unit;
  static constexpr int kPer = 1;  // elements of a unit
  static constexpr bool kRough = false;
  static vf multiply_add(vf acc, float a, vf b) { return fma(splat(a), b, acc); }

  // W units, of which `left` are there and the others 0.
  template <class S>
  static vf units(const S *p, int left) {
    return load_n(p, left);
  }

  // The tile (keys, width) of values.
  template <class S>
  static void pack_values(const S *rows, int dim, int width, float *tile, Ahead &ahead) {
    for (int j = 0; j < kBlock; j++)
      for (int d = 0; d < width; d += W) {
        if (d / W % (kNarrow ? 8 : 2) == 1) ahead.ask(1);
        store(tile + j * width + d, load_n(rows + j * dim + d, dim - d));
      }
  }

  static void weights(const vf *p, float *to) {
    for (int j = 0; j < kBlock / W; j++) store(to + j * W, p[j]);
  }
};

#if defined(__AVX512BF16__)
struct Paired {
  typedef uint32_t Unit;
  static constexpr int kPer = 2;
  static constexpr bool kRough = true;
  static vf multiply_add(vf acc, uint32_t a, vf b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
  }

  static vf units(const bf16 *p, int left) {
    return (vf)_mm512_maskz_loadu_epi32(left >= 16 ? 0xffff : (1u << left) - 1, p);
  }

  // Rows of two keys as pairs of their elements, 16 and 16 of them.
  static void interleave(vf even_key, vf odd_key, void *to, void *behind) {
    alignas(64) static const uint16_t order[64] = {
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 32);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16((__m512i)even_key, first, (__m512i)odd_key));
    if (behind) _mm512_storeu_si512(behind, _mm512_permutex2var_epi16((__m512i)even_key, second, (__m512i)odd_key));
  }

  template <class S>
  static void pack_values(const S *rows, int dim, int width, uint32_t *tile, Ahead &ahead) {
    for (int j = 0; j < kBlock; j += 2)
      for (int d = 0; d < width; d += 32) {
        const S *row = rows + j * dim + d;
        ahead.ask(1);
        uint32_t *to = tile + j / 2 * width + d;
        interleave(units(row, (dim - d) / 2), units(row + dim, (dim - d) / 2), to, d + 16 < width ? to + 16 : nullptr);
      }
  }

  static void weights(const vf *p, uint32_t *to) {
    for (int j = 0; j < kBlock / 32; j++) {
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)p[2 * j + 1], (__m512)p[2 * j]);
      _mm512_storeu_si512(to + j * 16, (__m512i)both);
    }
  }
};
#else
typedef Single Paired;
#endif

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Transposes W vectors of W lanes.
INLINE void transpose(vf *v) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; k++) {
      b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + k + 2]);
      b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + k + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int k = 0; k < 4; k++) {
      a[i + k] = _mm512_shuffle_i32x4(b[i + k], b[i + k + 4], 0x88);
      a[i + k + 4] = _mm512_shuffle_i32x4(b[i + k], b[i + k + 4], 0xdd);
    }
  for (int k = 0; k < 8; k++) {
    v[k] = (vf)_mm512_shuffle_i32x4(a[k], a[k + 8], 0x88);
    v[k + 8] = (vf)_mm512_shuffle_i32x4(a[k], a[k + 8], 0xdd);
  }
#elif defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; k++) {
      b[i + 2 * k] = _mm256_shuffle_ps(a[i + k], a[i + k + 2], 0x44);
      b[i + 2 * k + 1] = _mm256_shuffle_ps(a[i + k], a[i + k + 2], 0xee);
    }
  for (int k = 0; k < 4; k++) {
    v[k] = (vf)_mm256_permute2f128_ps(b[k], b[k + 4], 0x20);
    v[k + 4] = (vf)_mm256_permute2f128_ps(b[k], b[k + 4], 0x31);
  }
#else
  for (int i = 0; i < W; i++)
    for (int k = 0; k < i; k++) {
      const float x = v[i][k];
      v[i][k] = v[k][i];
      v[k][i] = x;
    }
#endif
}

// The tile (dim / kPer, keys) of keys.
template <class M, class S>
INLINE void pack_keys(const S *rows, int dim, typename M::Unit *tile, Ahead &ahead) {
  const int depth = dim / M::kPer;
  for (int j = 0; j < kBlock; j += W)
    for (int d = 0; d < depth; d += W) {
      const int left = depth - d;
      ahead.ask(kNarrow ? 1 : W / 2);
      vf v[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        const S *p = rows + (j + i) * dim + d * M::kPer;
        v[i] = M::units(p, left);
      }
      transpose(v);
      float *to = reinterpret_cast<float *>(tile) + d * kBlock + j;
      if (left >= W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store(to + i * kBlock, v[i]);
      } else {
        for (int i = 0; i < left; i++) store(to + i * kBlock, v[i]);
      }
    }
}

// c (R, C vectors) += a (R, depth units) b (depth, C vectors of units), or = if c is `fresh`.
template <class M, int R, int C>
INLINE void multiply(const typename M::Unit *a, int a_stride, const typename M::Unit *b, int b_stride, int depth,
                     float *c, int c_stride, bool fresh, Ahead &ahead) {
  constexpr bool kSeldom = kNarrow && R > 3;  // few rows wait for memory, many for what else is loaded
  vf sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) sum[r][j] = fresh ? vf{} : load(c + r * c_stride + j * W);
  for (int k = 0; k < depth; k++) {
    if (!kSeldom || k & 1) ahead.ask(fresh || kSeldom ? 1 : 2);
    vf column[C];
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) column[j] = load_as<vf>(b + k * b_stride + j * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int j = 0; j < C; j++) sum[r][j] = M::multiply_add(sum[r][j], a[r * a_stride + k], column[j]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int j = 0; j < C; j++) store(c + r * c_stride + j * W, sum[r][j]);
}

// The same for any `width` that is a multiple of W.
template <class M, int R>
INLINE void multiply(const typename M::Unit *a, int a_stride, const typename M::Unit *b, int width, int depth, float *c,
                     bool fresh, Ahead &ahead) {
  int j = 0;
  for (; j + kColumns<R> * W <= width; j += kColumns<R> * W)
    multiply<M, R, kColumns<R>>(a, a_stride, b + j, width, depth, c + j, width, fresh, ahead);
  if (kColumns<R> > 2 && j + 2 * W <= width) {
    multiply<M, R, 2>(a, a_stride, b + j, width, depth, c + j, width, fresh, ahead);
    j += 2 * W;
  }
  if (j < width) multiply<M, R, 1>(a, a_stride, b + j, width, depth, c + j, width, fresh, ahead);
}

template <class M>
void multiply_rows(int rows, const typename M::Unit *a, int a_stride, const typename M::Unit *b, int width, int depth,
                   float *c, bool fresh, Ahead &ahead) {
  switch (rows) {
    case 1: return multiply<M, 1>(a, a_stride, b, width, depth, c, fresh, ahead);
    case 2: return multiply<M, 2>(a, a_stride, b, width, depth, c, fresh, ahead);
    case 3: return multiply<M, 3>(a, a_stride, b, width, depth, c, fresh, ahead);
    case 4: return multiply<M, 4>(a, a_stride, b, width, depth, c, fresh, ahead);
    case 5: return multiply<M, 5>(a, a_stride, b, width, depth, c, fresh, ahead);
    default: return multiply<M, 6>(a, a_stride, b, width, depth, c, fresh, ahead);
  }
}

// Parts of a thread's scratch memory, each aligned to a cache line.
class Memory {
 public:
  template <class T>
  static size_t room(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }
  Memory(int slot, size_t bytes) : next_(static_cast<char *>(scratch(slot, bytes))) {}
  template <class T>
  T *take(size_t count) {
    T *p = reinterpret_cast<T *>(next_);
    next_ += room<T>(count);
    return p;
  }

 private:
  char *next_;
};

// ---- one share of the work ------------------------------------------------------------------------------------------

// Rows whose slots are their positions below `base`. Behind it each has its path; without parents there is no behind.
struct Run {
  const AttentionJob *job;
  const int32_t *positions;  // per row of the job
  int64_t first, last, base;

  bool tree() const { return base != INT64_MAX; }
  int64_t straight() const { return tree() ? base : job->start + last; }  // slots are positions up to here
};

// Rows [first, last) of a run over one key-value head and some spans: into `parts`, one of State::floats per span, or
// if there are none, combined and written out.
struct Piece {
  const Run *run;
  int head;
  int64_t first, last, span, spans;
  float *parts;
  const Piece *next;  // which its thread will most likely take
};

INLINE int width_of(const AttentionShape &shape) { return (shape.dim + W - 1) / W * W; }

// Of each row of heads: the weighted sum of values, W sums of weights or one, and the largest score.
struct State {
  float *sums, *weights, *top;
  int lanes, width;  // sums of weights, and of values

  static size_t floats(int64_t rows, int width) { return (rows * (width + W + 1) + 15) / 16 * 16; }
  State(float *p, int64_t rows, int width, int lanes)
      : sums(p), weights(p + rows * width), top(weights + rows * lanes), lanes(lanes), width(width) {}
  void clear(int64_t rows) const {
    memset(sums, 0, rows * (width + lanes) * sizeof(float));
    for (int64_t i = 0; i < rows; i++) top[i] = kNone;
  }
};

// Adds the part of one span to the total.
void combine(const State &total, int64_t to, const State &part, int64_t from) {
  float *weights = total.weights + to * total.lanes;
  const float *heavier = part.weights + from * part.lanes;
  if (part.top[from] == kNone) {  // no key was seen, or no score was a number: 0, or NaN
    for (int i = 0; i < total.lanes; i++) weights[i] += heavier[i];
    return;
  }
  const float top = total.top[to] > part.top[from] ? total.top[to] : part.top[from];
  const vf keep = splat(exp2(total.top[to] - top)), add = splat(exp2(part.top[from] - top));
  float *sums = total.sums + to * total.width;
  const float *more = part.sums + from * part.width;
  for (int d = 0; d < total.width; d += W) store(sums + d, load(sums + d) * keep + load(more + d) * add);
  for (int i = 0; i < total.lanes; i++) weights[i] = weights[i] * keep[0] + heavier[i] * add[0];
  total.top[to] = top;
}

void finish(const AttentionShape &shape, const State &total, int64_t row, int head, void *out) {
  const float *sums = total.sums + row * total.width;
  float weight = total.lanes == W ? sum(load(total.weights + row * W)) : total.weights[row], keep = 1;
  if (shape.sinks) {
    const float sink = shape.sinks[head] * kLog2e, top = total.top[row];
    if (sink > top) keep = exp2(top - sink);
    weight = weight * keep + (sink > top ? 1 : exp2(sink - top));
  }
  const vf share = splat(keep / weight);
  with_type(shape.type, [&](auto *to) {
    to = static_cast<decltype(to)>(out);
    for (int d = 0; d < shape.dim; d += W) store_n(to + d, load(sums + d) * share, shape.dim - d);
  });
}

void *out_of(const AttentionShape &shape, const AttentionJob &job, int64_t row, int head) {
  return static_cast<char *>(job.out) + (row * shape.heads + head) * shape.dim * size_of(shape.type);
}

// The rows of a piece, and which keys they see.
struct Rows {
  const AttentionShape &shape;
  const Piece &piece;
  const int group = shape.heads / shape.kv_heads;
  int64_t begin = 0, end = INT64_MAX;  // positions that all of them see

  Rows(const AttentionShape &shape, const Piece &piece) : shape(shape), piece(piece) {
    for (int64_t row = piece.first; row < piece.last; row++) {
      const int64_t last = piece.run->positions[row] + 1;
      if (last < end) end = last;
      if (shape.window && last - shape.window > begin) begin = last - shape.window;
    }
  }

  int64_t count() const { return (piece.last - piece.first) * group; }  // of heads
  // The query of a row of a head.
  template <class Q>
  const Q *query(int64_t row) const {
    const int64_t head = piece.head * group + row % group;
    return static_cast<const Q *>(piece.run->job->q) + (piece.first + row / group) * shape.q_stride + head * shape.dim;
  }
  // Which keys of the block from `at` a row of a token sees: [low, high), none if they cross.
  int low(int64_t token, int64_t at) const {
    const int64_t oldest = shape.window ? piece.run->positions[token] - shape.window + 1 - at : 0;
    return int(oldest < 0 ? 0 : oldest > kBlock ? kBlock : oldest);
  }
  int high(int64_t token, int64_t at) const {
    const int64_t last = piece.run->positions[token] + 1 - at;
    return int(last < 0 ? 0 : last > kBlock ? kBlock : last);
  }
  bool sees(int64_t token, int64_t at) const { return low(token, at) < high(token, at); }
  bool all_see(int64_t at) const { return begin <= at && at + kBlock <= end; }
};

template <class S>
struct Sides {
  const S *keys, *values;
};

// Keys and values of kBlock positions from `at` on, for the tokens [first, last); and what to ask for meanwhile.
template <class S>
struct Block {
  int64_t at;
  const S *keys, *values;
  Sides<S> later;
  int64_t first, last;
};

INLINE Ahead ahead_of(const void *memory) { return {static_cast<const char *>(memory), 64}; }

INLINE void cap(const AttentionShape &shape, float *scores, int64_t count) {
  const vf in = splat(2 * shape.scale / shape.softcap), out = splat(shape.softcap / shape.scale);
  for (int64_t i = 0; i < count; i += W)  // tanh(x) = 1 - 2 / (1 + e^2x)
    store(scores + i, out * (1.0f - 2.0f / (1.0f + exp(load(scores + i) * in))));
}

// What else makes scores: a cap, and which keys a row sees. A line for each row.
void complete(const Rows &rows, int64_t at, bool whole, int64_t row, int64_t count, float *scores) {
  if (rows.shape.softcap != 0) cap(rows.shape, scores, count * kBlock);
  for (int64_t r = 0; !whole && r < count; r++) {
    const int64_t token = rows.piece.first + (row + r) / rows.group;
    const float from = float(rows.low(token, at)), to = float(rows.high(token, at));
    for (int j = 0; j < kBlock; j += W) {
      const vf lane = load(kLanes.at + j), score = load(scores + r * kBlock + j);
      store(scores + r * kBlock + j, ((lane >= from) & (lane < to)) ? score : splat(kNone));
    }
  }
}

// What is summed so far of a row shrinks, as there is a larger score than all before.
__attribute__((noinline, cold)) void raise(const State &state, int64_t row, float top) {
  const vf keep = splat(exp2(state.top[row] - top));
  float *sums = state.sums + row * state.width, *weights = state.weights + row * state.lanes;
  for (int d = 0; d < state.width; d += W) store(sums + d, load(sums + d) * keep);
  for (int i = 0; i < state.lanes; i++) weights[i] *= keep[0];
  state.top[row] = top;
}

// A block after the other, in vectors: its keys and values are packed, and serve all rows.
template <class M, class S>
class Vectors {
  typedef typename M::Unit Unit;

 public:
  static constexpr int kSums = W;  // of weights, for each row
  struct Mode {};

  Vectors(const Rows &rows)
      : rows_(rows), shape_(rows.shape), depth_(shape_.dim / M::kPer), width_(width_of(shape_)),
        factor_(shape_.scale * kLog2e) {}

  size_t room() const {
    return Memory::room<Unit>(rows_.count() * depth_) + Memory::room<Unit>(size_t(depth_) * kBlock) +
           Memory::room<Unit>(size_t(kBlock) / M::kPer * width_);
  }

  void begin(Memory &memory) {
    queries_ = memory.take<Unit>(rows_.count() * depth_);
    keys_ = memory.take<Unit>(size_t(depth_) * kBlock);
    values_ = memory.take<Unit>(size_t(kBlock) / M::kPer * width_);
    for (int64_t row = 0; row < rows_.count(); row++) {
      Unit *to = queries_ + row * depth_;
      if constexpr (M::kPer == 2) {
        memcpy(to, rows_.query<bf16>(row), shape_.dim * sizeof(bf16));
      } else {
        with_type(shape_.type, [&](auto *type) {
          const auto *from = rows_.template query<std::remove_pointer_t<decltype(type)>>(row);
          for (int d = 0; d < shape_.dim; d += W) store_n(to + d, load_n(from + d, shape_.dim - d), shape_.dim - d);
        });
      }
    }
  }

  void take(const Block<S> &block, bool whole, const State &state) {
    Ahead later_keys = ahead_of(block.later.keys), later_values = ahead_of(block.later.values);
    switch (shape_.dim) {
      case 64: pack<64>(block, later_keys, later_values); break;
      case 128: pack<128>(block, later_keys, later_values); break;
      default: pack<0>(block, later_keys, later_values);
    }
    const int64_t row = (block.first - rows_.piece.first) * rows_.group;
    evenly((block.last - block.first) * rows_.group, kPanel, [&](int64_t r, int count) {
      panel(block, row + r, count, whole, state, later_keys, later_values);
    });
  }

  void settle(const State &) {}

 private:
  // Some rows over the tiles of a block: scores, weights, sums.
  void panel(const Block<S> &block, int64_t row, int count, bool whole, const State &state, Ahead &later_keys,
             Ahead &later_values) {
    alignas(64) float scores[kPanel * kBlock];
    alignas(64) Unit weights[kPanel * kBlock / M::kPer];
    multiply(count, queries_ + row * depth_, depth_, keys_, kBlock, scores, true, later_values);
    complete(rows_, block.at, whole, row, count, scores);
    weigh(scores, row, count, state, weights);
    multiply(count, weights, kBlock / M::kPer, values_, width_, state.sums + row * width_, false, later_keys);
    later_keys.step = later_values.step = 0;
  }

  void multiply(int rows, const Unit *a, int depth, const Unit *b, int width, float *c, bool fresh, Ahead &ahead) {
    evenly(rows, kRows, [&](int64_t r, int count) {
      multiply_rows<M>(count, a + r * depth, depth, b, width, depth, c + r * width, fresh, ahead);
    });
  }

  // The tiles of a block; known dimensions make plain addresses.
  template <int known>
  void pack(const Block<S> &block, Ahead &later_keys, Ahead &later_values) {
    pack_keys<M, S>(block.keys, known ? known : shape_.dim, keys_, later_values);
    M::pack_values(block.values, known ? known : shape_.dim, known ? known : width_, values_, later_keys);
  }

  // Calls f(first, rows) for parts of at most so many rows, as even as they can be.
  template <class F>
  static void evenly(int64_t count, int most, F f) {
    int64_t row = 0;
    for (int64_t parts = (count + most - 1) / most; parts; parts--) {
      const int rows = int((count - row + parts - 1) / parts);
      f(row, rows);
      row += rows;
    }
  }

  // Scores of a block become weights, relative to about the largest score so far; none if no key was seen as yet.
  void weigh(const float *scores, int64_t row, int64_t count, const State &state, Unit *to) const {
    constexpr int kVectors = kBlock / W;
    float *tops = state.top + row, *sums = state.weights + row * W;
    const vf factor = splat(factor_);
    for (int64_t r = 0; r < count; r++) {
      vf v[kVectors], most = splat(kNone);
      for (int j = 0; j < kVectors; j++) {
        v[j] = load(scores + r * kBlock + j * W) * factor;
        most = max(most, v[j]);
      }
      if (any_above(most, tops[r] + kRise)) raise(state, row + r, max(most));
      const vf top = splat(tops[r] == kNone ? 0.f : tops[r]);
      vf sum = load(sums + r * W);
      for (int j = 0; j < kVectors; j++) {
        v[j] = exp2<M::kRough>(v[j] - top);
        sum += v[j];
      }
      store(sums + r * W, sum);
      M::weights(v, to + r * kBlock / M::kPer);
    }
  }

  const Rows &rows_;
  const AttentionShape &shape_;
  const int depth_, width_;
  const float factor_;
  Unit *queries_, *keys_, *values_;
};

#if defined(__AMX_BF16__)
// The same of bf16 in AMX tiles, with one order of every sum in two ways. Of few rows, a line of scores is a row's, a lane
// a key's: keys are packed, as for vectors. Of many, a line is a key's, a lane one of 16 rows': keys enter as they lie,
// queries are turned once, and weights are turned back. What waits for its values is added to the sums together, lest they
// be fetched for each block; but block after block, which is what makes the bits.
template <class S>
class Tiles {
 public:
  static constexpr int kSums = 1;
  using Mode = NoSubnormals;  // small weights would take hundreds of cycles each

  Tiles(const Rows &rows)
      : rows_(rows), shape_(rows.shape), depth_((shape_.dim + 31) / 32 * 16), width_(width_of(shape_)),
        padded_((rows.count() + 31) / 16 * 16), factor_(shape_.scale * kLog2e) {}

  size_t room() const {
    return 2 * Memory::room<float>(padded_ * depth_) + Memory::room<float>(kBlock * depth_) +
           Memory::room<float>(kTogether * kBlock / 2 * width_) + Memory::room<float>(padded_ * kLine) +
           Memory::room<float>(2 * kBlock * 16) + Memory::room<int>(padded_ / 16);
  }

  void begin(Memory &memory) {
    queries_ = memory.take<float>(padded_ * depth_), turned_ = memory.take<float>(padded_ * depth_);
    keys_ = memory.take<float>(kBlock * depth_);
    values_ = memory.take<float>(kTogether * kBlock / 2 * width_);
    weights_ = memory.take<float>(padded_ * kLine);
    scores_ = memory.take<float>(2 * kBlock * 16);
    added_ = memory.take<int>(padded_ / 16);
    for (int64_t first = 0; first < rows_.count(); first += 16)
      for (int d = 0; d < depth_; d += 16) {
        vf v[16];
        for (int i = 0; i < 16; i++) {
          v[i] = first + i < rows_.count() ? Paired::units(rows_.query<bf16>(first + i) + 2 * d, shape_.dim / 2 - d) : vf{};
          store(queries_ + (first + i) * depth_ + d, v[i]);
        }
        if (rows_.count() <= kFew) continue;
        transpose(v);
        for (int i = 0; i < 16; i++) store(turned_ + first * depth_ + (d + i) * 16, v[i]);
      }
  }

  void take(const Block<S> &block, bool whole, const State &state) {
    if (count_ == kTogether || block.first != first_ || block.last != last_) settle(state);
    if (!count_) {
      first_ = block.first, last_ = block.last;
      row_ = (first_ - rows_.piece.first) * rows_.group, end_ = (last_ - rows_.piece.first) * rows_.group;
      memset(added_, 0, padded_ / 16 * sizeof(int));
    }
    Ahead keys = ahead_of(block.later.keys), values = ahead_of(block.later.values);
    const bool few = end_ - row_ <= kFew;
    switch (shape_.dim) {
      case 64: pack<64>(block, few, keys, values); break;
      case 128: pack<128>(block, few, keys, values); break;
      default: pack<0>(block, few, keys, values);
    }
    if (few) {
      score_rows(keys, values);
      complete(rows_, block.at, whole, row_, end_ - row_, scores_);
      weigh_rows(state);
    } else {
      score(block, 0);
      for (int i = 0; i < parts(); i++) {
        if (i + 1 < parts()) score(block, i + 1);  // whose tiles are at work while these are weighed
        if (i == 0) weigh<true>(block, i, whole, state, keys, values);
        else weigh<false>(block, i, whole, state, keys, values);
      }
    }
    count_++;
  }

  // Adds what waits to the sums.
  void settle(const State &state) {
    for (int i = 0; count_ && i < parts(); i += 2) settle(i, state);
    count_ = 0;
  }

 private:
  static constexpr int kTogether = 2, kLine = kTogether * 16;  // blocks; pairs of their weights
  static constexpr int kFew = 8;  // rows of heads

  // The parts of 16 rows of heads that were turned together; the first and the last may have fewer.
  int parts() const { return int((end_ + 15) / 16 - row_ / 16); }
  int64_t from(int part) const { return part ? (row_ / 16 + part) * 16 : row_; }
  int64_t to(int part) const { return (row_ / 16 + part + 1) * 16 < end_ ? (row_ / 16 + part + 1) * 16 : end_; }

  // Values as pairs of neighbouring keys, 16 columns after the other. Known dimensions make plain addresses.
  template <int known>
  void pack(const Block<S> &block, bool few, Ahead &keys_ahead, Ahead &values_ahead) const {
    const int dim = known ? known : shape_.dim, width = known ? known : width_;
    Ahead keys = keys_ahead, values = values_ahead;
    if (few) {
      pack_keys<Paired, S>(block.keys, dim, reinterpret_cast<uint32_t *>(keys_), values);
      memset(keys_ + dim / 2 * kBlock, 0, (depth_ - dim / 2) * kBlock * sizeof(float));  // up to whole tiles
    }
    float *tile = values_ + count_ * kBlock / 2 * width;
    for (int j = 0; j < kBlock; j += 2)
      for (int d = 0; d < width; d += 32) {
        const S *row = block.values + j * dim + d;
        keys.ask(1);
        if (!few) values.ask(1);
        float *to = tile + d * kBlock / 2 + j / 2 * 16;
        Paired::interleave(Paired::units(row, (dim - d) / 2), Paired::units(row + dim, (dim - d) / 2), to,
                           d + 16 < width ? to + 256 : nullptr);
      }
    keys_ahead = keys, values_ahead = values;
  }

  // Scores of few rows, a line for each.
  void score_rows(Ahead &keys, Ahead &values) {
    shapes_.set(int(end_ - row_));
    const size_t deep = depth_ * sizeof(float), line = kBlock * sizeof(float);
    tile_products<bf16>({queries_ + row_ * depth_, deep, 16 * deep, 64}, false, {keys_, line, 64, 16 * line}, true, depth_ / 16,
                        scores_, line, true, [&](int) { keys.ask(16), values.ask(16); });
  }

  // Scores of a part, a line for each key.
  void score(const Block<S> &block, int part) {
    const void *keys = block.keys;
    size_t line = shape_.dim * sizeof(S);
    if (shape_.dim % 32) {
      for (int j = 0; !part && j < kBlock; j++)
        for (int d = 0; d < depth_; d += 16)
          store(keys_ + j * depth_ + d, Paired::units(block.keys + j * shape_.dim + 2 * d, shape_.dim / 2 - d));
      keys = keys_, line = depth_ * sizeof(float);
    }
    shapes_.set(32);
    const float *queries = turned_ + from(part) / 16 * 16 * depth_;
    tile_products<bf16>({keys, line, 16 * line, 64}, true, {queries, 64, 0, 1024}, false, depth_ / 16,
                        scores_ + part % 2 * kBlock * 16, 64, true, [](int) {});
  }

  // 2^x, for x little above 0 or less, of relative error 8e-5, and half of what bf16 leaves out, which is cut off then.
  static vf power(vf x) {
    const vf r = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    vf y = fma(r, splat(0.07802452f), splat(0.22606724f));
    y = fma(r, y, splat(0.69583347f));
    y = fma(r, y, splat(0.99992523f + 0x1p-8f));
    return (vf)((vu)(vf)_mm512_scalef_ps((__m512)y, (__m512)x) & 0xffff0000u);
  }

  // Scores become weights, relative to about the largest score so far, and are summed by halves: keys 16 apart, then 8 ...
  void weigh_rows(const State &state) {
    alignas(64) static constexpr struct Upper {
      uint16_t at[32];
      constexpr Upper() : at() {
        for (int i = 0; i < 32; i++) at[i] = uint16_t(2 * i + 1);
      }
    } kUpper;
    const vf factor = splat(factor_);
    for (int64_t row = row_; row < end_; row++) {
      const float *scores = scores_ + (row - row_) * kBlock;
      vf v[2] = {load(scores), load(scores + W)};
      const vf most = max(v[0], v[1]) * factor;
      if (any_above(most, state.top[row] + kRise)) {
        settle(0, state);
        raise(state, row, max(most));
      }
      const vf shift = splat(state.top[row] == kNone ? 0.f : -state.top[row]);
      for (int j = 0; j < 2; j++) v[j] = power(fma(v[j], factor, shift));
      state.weights[row] += sum(v[0] + v[1]);
      const __m512i both = _mm512_permutex2var_epi16((__m512i)v[0], _mm512_load_si512(kUpper.at), (__m512i)v[1]);
      _mm512_store_si512(weights_ + row * kLine + count_ * 16, both);
    }
  }

  // The same of a part, a lane for each row.
  template <bool ahead>
  void weigh(const Block<S> &block, int part, bool whole, const State &state, Ahead &keys_ahead, Ahead &values_ahead) {
    float *scores = scores_ + part % 2 * kBlock * 16;
    if (shape_.softcap != 0) cap(shape_, scores, kBlock * 16);
    const int64_t row = (row_ / 16 + part) * 16;
    const __mmask16 lanes = __mmask16((1u << (to(part) - row)) - (1u << (from(part) - row)));
    if (!whole) mask(scores, part, block.at);
    const vf factor = splat(factor_);
    vf most[4] = {splat(kNone), splat(kNone), splat(kNone), splat(kNone)};
#pragma GCC unroll 32
    for (int j = 0; j < kBlock; j++) most[j % 4] = max(load(scores + j * 16), most[j % 4]);
    most[0] = max(max(most[0], most[1]), max(most[2], most[3])) * factor;
    vf top = (vf)_mm512_maskz_loadu_ps(lanes, state.top + row);
    if (const unsigned above = _mm512_mask_cmp_ps_mask(lanes, (__m512)most[0], (__m512)(top + kRise), _CMP_GT_OQ)) {
      settle(part / 2 * 2, state);
      for (int i = 0; i < 16; i++)
        if (above >> i & 1) raise(state, row + i, most[0][i]);
      top = (vf)_mm512_maskz_loadu_ps(lanes, state.top + row);
    }
    const vf shift = top == kNone ? vf{} : -top;
    Ahead keys = keys_ahead, values = values_ahead;
    vf pairs[16], sums[4][2];
#pragma GCC unroll 8
    for (int n = 0; n < 8; n++) {
      const int i = n >> 2 | (n & 2) | (n & 1) << 2;  // 0, 4, 2, 6 ..., as sums by halves want them
      if (ahead) keys.ask(4), values.ask(4);
      vf weights[2][2];
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++)
          weights[h][odd] = power(fma(load(scores + (2 * i + 16 * h + odd) * 16), factor, shift));
      vf sum[2] = {weights[0][0] + weights[1][0], weights[0][1] + weights[1][1]};
      int level = 0;
#pragma GCC unroll 3
      for (; n >> level & 1; level++) sum[0] = sums[level][0] + sum[0], sum[1] = sums[level][1] + sum[1];
      sums[level][0] = sum[0], sums[level][1] = sum[1];
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) pairs[i + 8 * h] = (vf)(((vu)weights[h][0] >> 16) | (vu)weights[h][1]);
    }
    keys_ahead = keys, values_ahead = values;
    const __m512 before = _mm512_maskz_loadu_ps(lanes, state.weights + row);
    _mm512_mask_storeu_ps(state.weights + row, lanes, before + (__m512)(sums[3][0] + sums[3][1]));
    transpose(pairs);
    float *to = weights_ + row * kLine + count_ * 16;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) store(to + i * kLine, pairs[i]);
  }

  // Scores of keys that the queries do not see.
  void mask(float *scores, int part, int64_t at) const {
    alignas(64) int low[16] = {}, high[16] = {};
    const int64_t row = (row_ / 16 + part) * 16;
    for (int64_t i = from(part); i < to(part); i++) {
      const int64_t token = rows_.piece.first + i / rows_.group;
      low[i - row] = rows_.low(token, at), high[i - row] = rows_.high(token, at);
    }
    const __m512i first = _mm512_load_si512(low), end = _mm512_load_si512(high);
    for (int j = 0; j < kBlock; j++) {
      const __m512i key = _mm512_set1_epi32(j);
      const __mmask16 unseen = _mm512_cmpgt_epi32_mask(first, key) | _mm512_cmple_epi32_mask(end, key);
      _mm512_mask_storeu_ps(scores + j * 16, unseen, (__m512)splat(kNone));
    }
  }

  // Adds what two parts have of the blocks so far to their sums.
  void settle(int part, const State &state) {
    const int64_t row = from(part), end = part + 1 < parts() ? to(part + 1) : to(part);
    const int first = added_[part], count = int(end - row);
    const size_t line = kLine * sizeof(float), next = size_t(width_) * 64;
    if (first == count_) return;
    added_[part] = count_;
    shapes_.set(count);
    for (int d = 0; d < width_; d += 32) {
      const float *weights = weights_ + row * kLine + first * 16, *values = values_ + first * 16 * width_ + d * 16;
      tile_products<bf16>({weights, line, 16 * line, 64}, count > 16, {values, 64, 1024, next}, width_ - d > 16, count_ - first,
                          state.sums + row * width_ + d, width_ * sizeof(float), false, [](int) {});
    }
  }

  const Rows &rows_;
  const AttentionShape &shape_;
  const int depth_, width_;
  const int64_t padded_;
  const float factor_;
  int64_t first_ = 0, last_ = 0, row_, end_;  // tokens that all blocks so far are for, and their rows
  int count_ = 0;                             // blocks that wait
  float *queries_, *turned_, *keys_, *values_, *weights_, *scores_;
  int *added_;  // of each part, how many of the blocks are added already
  TileShapes shapes_;
};

template <class S>
using Bf16 = Tiles<S>;
#else
template <class S>
using Bf16 = Vectors<Paired, S>;
#endif

template <class Products, class S>
class Worker {
 public:
  Worker(const AttentionShape &shape, const Piece &piece)
      : shape_(shape), piece_(piece), run_(*piece.run), job_(*piece.run->job), rows_(shape, piece), products_(rows_),
        ahead_((kAhead / (shape.dim * int(sizeof(S))) + kBlock - 1) / kBlock * kBlock) {}

  void work() {
    const int width = width_of(shape_);
    const int64_t rows = rows_.count();
    const size_t floats = State::floats(rows, width);
    Memory memory(kTaskSlot, products_.room() + Memory::room<S>(3 * kBlock * shape_.dim) + 2 * Memory::room<float>(floats));
    products_.begin(memory);
    gathered_ = memory.take<S>(3 * kBlock * shape_.dim);
    float *own = memory.take<float>(floats);
    const State total(memory.take<float>(floats), rows, width, Products::kSums);
    if (!piece_.parts) total.clear(rows);
    for (int64_t i = 0; i < piece_.spans; i++) {
      const State part(piece_.parts ? piece_.parts + i * floats : own, rows, width, Products::kSums);
      part.clear(rows);
      span(piece_.span + i, part);
      if (!piece_.parts)
        for (int64_t row = 0; row < rows; row++) combine(total, row, part, row);
    }
    if (piece_.parts) return;
    for (int64_t row = 0; row < rows; row++) {
      const int head = piece_.head * rows_.group + int(row % rows_.group);
      finish(shape_, total, row, head, out_of(shape_, job_, piece_.first + row / rows_.group, head));
    }
  }

 private:
  void span(int64_t span, const State &state) {
    [[maybe_unused]] const typename Products::Mode while_it_lasts{};
    int64_t slots[kBlock];
    for (int64_t at = span * kSpan; at < (span + 1) * kSpan; at += kBlock) {
      int64_t first = piece_.first, last = piece_.last;
      while (first < last && !rows_.sees(first, at)) first++;
      while (first < last && !rows_.sees(last - 1, at)) last--;
      if (first == last) continue;
      const int64_t straight = run_.straight();
      if (at + kBlock <= straight) {
        const Sides<S> here = lies(piece_, at);
        block({at, here.keys, here.values, later(at), first, last}, state);
        continue;
      }
      for (int j = 0; j < kBlock; j++) slots[j] = at + j < straight ? at + j : -1;
      if (!run_.tree()) {
        gather(at, slots, first, last, state);
        continue;
      }
      for (int64_t row = first; row < last; row++) {
        if (!rows_.sees(row, at)) continue;
        for (int j = 0; j < kBlock; j++)
          if (at + j >= straight) slots[j] = -1;
        int64_t node = row;
        for (int64_t p = run_.positions[row]; p >= at && p >= straight; p--, node = job_.parents[node])
          if (p < at + kBlock) slots[p - at] = job_.start + node;
        gather(at, slots, row, row + 1, state);
      }
    }
    products_.settle(state);
  }

  // The key and the value of the piece's head in a slot.
  Sides<S> lies(const Piece &piece, int64_t slot) const {
    const AttentionJob &job = *piece.run->job;
    const AttentionJob::Place place = job.place(slot);
    const S *keys = reinterpret_cast<S *>(place.store) + (piece.head * job.capacity + place.slot) * shape_.dim;
    return {keys, keys + shape_.kv_heads * job.capacity * shape_.dim};
  }

  // What to ask for while the block at a position is done: what follows in this piece, and at its end the next one.
  Sides<S> later(int64_t at) const {
    const Piece *piece = &piece_;
    const int64_t own = (piece_.span + piece_.spans) * kSpan, end = own < run_.straight() ? own : run_.straight();
    at += ahead_;
    if (at >= end && (piece = piece_.next)) {
      const int64_t oldest = shape_.window ? piece->run->positions[piece->first] - shape_.window + 1 : 0;
      const int64_t begin = oldest > piece->span * kSpan ? oldest / kBlock * kBlock : piece->span * kSpan;
      at += begin - (end + kBlock - 1) / kBlock * kBlock;
    }
    return piece && at < piece->run->straight() ? lies(*piece, at) : Sides<S>{gathered_, gathered_};
  }

  // A block whose keys lie in these slots; -1: there is none.
  void gather(int64_t at, const int64_t *slots, int64_t first, int64_t last, const State &state) {
    for (int side = 0; side < 2; side++)
      for (int j = 0; j < kBlock; j++) {
        S *to = gathered_ + (side * kBlock + j) * shape_.dim;
        if (slots[j] < 0)
          memset(to, 0, shape_.dim * sizeof(S));
        else
          memcpy(to, side ? lies(piece_, slots[j]).values : lies(piece_, slots[j]).keys, shape_.dim * sizeof(S));
      }
    const Sides<S> own{gathered_, gathered_ + kBlock * shape_.dim};
    block({at, own.keys, own.values, run_.tree() ? own : later(at), first, last}, state);
  }

  void block(const Block<S> &block, const State &state) {
    const bool whole = rows_.all_see(block.at);
    if (whole || finite(block.values)) return products_.take(block, whole, state);
    S *seen = gathered_ + 2 * kBlock * shape_.dim;  // 0 times infinity is NaN, also for who is not to see it
    for (int64_t token = block.first; token < block.last; token++) {
      const int from = rows_.low(token, block.at), to = rows_.high(token, block.at);
      memset(seen, 0, kBlock * shape_.dim * sizeof(S));
      if (from < to)
        memcpy(seen + from * shape_.dim, block.values + from * shape_.dim, (to - from) * shape_.dim * sizeof(S));
      Block<S> own = block;
      own.values = seen, own.first = token, own.last = token + 1;
      products_.take(own, false, state);
    }
  }

  // Whether a block of values is. A sum of its numbers' own width is what a compiler makes vectors of.
  bool finite(const S *values) const {
    using Bits = std::conditional_t<sizeof(S) == 2, uint16_t, uint32_t>;
    constexpr Bits kExponent = std::is_same_v<S, f16> ? 0x7c00u : sizeof(S) == 2 ? 0x7f80u : Bits(0x7f800000u);
    const int size = shape_.dim * int(sizeof(S) / sizeof(Bits));
    Bits bad = 0;
    for (int i = 0; i < kBlock * size; i++) {
      Bits bits;
      memcpy(&bits, reinterpret_cast<const Bits *>(values) + i, sizeof bits);
      bad |= (bits & kExponent) == kExponent;
    }
    return !bad;
  }

  const AttentionShape &shape_;
  const Piece &piece_;
  const Run &run_;
  const AttentionJob &job_;
  const Rows rows_;
  Products products_;
  const int ahead_;
  S *gathered_;
};

void work(const AttentionShape &shape, const Piece &piece) {
  if (shape.type == Type::bf16) return Worker<Bf16<bf16>, bf16>(shape, piece).work();
  if (shape.type == Type::f16) return Worker<Vectors<Single, f16>, f16>(shape, piece).work();
  return Worker<Vectors<Single, float>, float>(shape, piece).work();
}

// ---- the whole ------------------------------------------------------------------------------------------------------

// Puts the new keys and values where they belong.
void write(const AttentionShape &shape, const AttentionJob &job) {
  const size_t size = size_of(shape.type);
  for (int side = 0; side < 2; side++)
    for (int64_t i = 0; i < job.n; i++) {
      const AttentionJob::Place place = job.place(job.start + i);
      const char *from = static_cast<const char *>(side ? job.values : job.keys);
      from += i * (side ? shape.v_stride : shape.k_stride) * size;
      for (int64_t head = 0; head < shape.kv_heads; head++) {
        const int64_t slot = (side * shape.kv_heads + head) * job.capacity + place.slot;
        const size_t bytes = shape.dim * size;
        memcpy(place.store + slot * bytes, from + head * bytes, bytes);
      }
    }
}

// Positions of a job's rows; and how many of its first rows are a plain run.
int64_t place(const AttentionJob &job, int32_t *positions) {
  int64_t straight = 0;
  for (int64_t i = 0; i < job.n; i++) {
    const int64_t parent = job.parents ? job.parents[i] : i - 1;
    positions[i] = parent < 0 ? int32_t(job.start) : positions[parent] + 1;
    if (parent == i - 1 && straight == i) straight++;
  }
  return straight;
}

// The first position at which one of the rows behind the plain run leaves it.
int64_t fork(const AttentionJob &job, int64_t straight) {
  int64_t base = job.start + straight;
  for (int64_t i = straight; i < job.n; i++)
    if (job.parents[i] < straight && job.start + job.parents[i] + 1 < base) base = job.start + job.parents[i] + 1;
  return base;
}

void attend(const AttentionShape &shape, const AttentionJob *jobs, int count) {
  constexpr size_t kMostParts = size_t(64) << 20;  // bytes
  const int group = shape.heads / shape.kv_heads, width = width_of(shape);
  const int64_t most = kChunk / group > 1 ? kChunk / group : 1;
  int64_t tokens = 0;
  for (int i = 0; i < count; i++) tokens += jobs[i].n;

  Memory run_memory(kRunSlot, Memory::room<int32_t>(tokens) + Memory::room<Run>(2 * count));
  int32_t *positions = run_memory.take<int32_t>(tokens);
  Run *runs = run_memory.take<Run>(2 * count);
  int run_count = 0;
  for (int i = 0; i < count; i++) {
    const AttentionJob &job = jobs[i];
    if (job.keys) write(shape, job);
    const int64_t straight = place(job, positions);
    if (straight < job.n) {
      // A tree's first rows take its blocks one by one, too, where that is less than to read what is before it twice.
      const int64_t base = fork(job, straight), some = job.first < straight ? straight - job.first : 0;
      const int64_t first = some * kBlock > base ? straight : job.first;
      if (job.first < first) runs[run_count++] = {&job, positions, job.first, first, INT64_MAX};
      if (first < job.n) runs[run_count++] = {&job, positions, first, job.n, base};
    } else if (job.first < straight) {
      runs[run_count++] = {&job, positions, job.first, straight, INT64_MAX};
    }
    positions += job.n;
  }

  // Shares of rows and heads, and if these are too few for the threads, of spans too. The bits are the same.
  struct Share {
    Piece piece;
    int64_t parts;  // where its parts begin, in floats
  };
  const int64_t heads = int64_t(run_count) * shape.kv_heads;
  // The rows of a share: where heads are few for the threads, and all keys in one span, fewer, though each packs the keys.
  const auto rows_of = [&](const Run &run) {
    const int64_t rows = run.last - run.first, fair = (2 * shape.threads + heads - 1) / heads, possible = rows / kLeast;
    const bool whole = shape.threads == 1 || run.job->start + run.job->n > kSpan || possible < 2;
    const int64_t ways = whole ? 1 : fair < possible ? fair : possible, even = (rows + ways - 1) / ways;
    return even < most ? even : most;
  };
  size_t most_shares = 0;
  for (int i = 0; i < run_count; i++)
    most_shares += (runs[i].last - runs[i].first + rows_of(runs[i]) - 1) / rows_of(runs[i]) * shape.kv_heads;
  Share *shares = Memory(kShareSlot, Memory::room<Share>(most_shares)).take<Share>(most_shares);
  int share_count = 0;
  int64_t pieces = 0;
  size_t floats = 0;
  for (int i = 0; i < run_count; i++)
    for (int64_t first = runs[i].first, last; first < runs[i].last; first = last) {
      last = first + rows_of(runs[i]) < runs[i].last ? first + rows_of(runs[i]) : runs[i].last;
      int64_t low = INT64_MAX, high = 0;
      for (int64_t row = first; row < last; row++) {
        const int64_t at = runs[i].positions[row], oldest = shape.window ? at - shape.window + 1 : 0;
        if (oldest < low) low = oldest;
        if (at > high) high = at;
      }
      const int64_t span = low > 0 ? low / kSpan : 0, spans = high / kSpan + 1 - span;
      for (int head = 0; head < shape.kv_heads; head++) {
        shares[share_count++] = {{runs + i, head, first, last, span, spans, nullptr, nullptr}, int64_t(floats)};
        if (share_count > 1) shares[share_count - 2].piece.next = &shares[share_count - 1].piece;
        pieces += spans;
        floats += spans * State::floats((last - first) * group, width);
      }
    }
  if (share_count >= 4 * shape.threads || pieces == share_count || floats * sizeof(float) > kMostParts) {
    pool::parallel(share_count, shape.threads, [&](int i) { work(shape, shares[i].piece); });
    return;
  }
  Memory parts_memory(kPartSlot, Memory::room<float>(floats) + Memory::room<Piece>(pieces));
  float *parts = parts_memory.take<float>(floats);
  Piece *split = parts_memory.take<Piece>(pieces);
  // Spans in a row are read faster; some shares for each thread, lest one wait for another.
  const int64_t fair = pieces / (8 * shape.threads), together = fair > 1 ? fair : 1;
  int next = 0;
  for (int i = 0; i < share_count; i++) {
    const Piece &piece = shares[i].piece;
    for (int64_t s = 0; s < piece.spans; s += together) {
      const int64_t spans = piece.spans - s < together ? piece.spans - s : together;
      float *part = parts + shares[i].parts + s * State::floats((piece.last - piece.first) * group, width);
      split[next++] = {piece.run, piece.head, piece.first, piece.last, piece.span + s, spans, part, nullptr};
      if (next > 1) split[next - 2].next = split + next - 1;
    }
  }
  pool::parallel(next, shape.threads, [&](int i) { work(shape, split[i]); });
  pool::parallel(share_count, shape.threads, [&](int i) {
    const Piece &piece = shares[i].piece;
    const int64_t rows = (piece.last - piece.first) * group;
    Memory memory(kTaskSlot, Memory::room<float>(State::floats(1, width)));
    const int lanes = shape.type == Type::bf16 ? Bf16<bf16>::kSums : Vectors<Single, float>::kSums;
    const State total(memory.take<float>(State::floats(1, width)), 1, width, lanes);
    for (int64_t row = 0; row < rows; row++) {
      total.clear(1);
      for (int64_t s = 0; s < piece.spans; s++)
        combine(total, 0, State(parts + shares[i].parts + s * State::floats(rows, width), rows, width, lanes), row);
      const int head = piece.head * group + int(row % group);
      finish(shape, total, 0, head, out_of(shape, *piece.run->job, piece.first + row / group, head));
    }
  });
}

}  // namespace

constexpr AttentionKernels attention_kernels = {attend};

}  // namespace OUTRIDER_ISA
