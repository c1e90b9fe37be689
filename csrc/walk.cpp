#include "walk.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pool.h"
#include "scratch.h"

namespace {

constexpr int kSlot = 8;      // of scratch memory
constexpr int kNormed = -1;   // the point behind the final norm

class Step {
 public:
  Step(const Walk &w, const WalkPlan &plan)
      : w_(w), plan_(plan), size_(size_of(w.type)), width_((w.heads + 2 * w.kv_heads) * w.dim) {
    size_t wide = 0, both = 0;
    for (const WalkLayer &layer : w.layers) {
      if (layer.experts) continue;
      wide = std::max<size_t>(wide, layer.down[0]->inputs);
      if (!layer.gate_up[0]->gated) both = std::max<size_t>(both, 2 * layer.down[0]->inputs);
    }
    turns_ = plan.rows ? int(plan.turns.size()) / plan.rows : 0;
    const size_t turns = size_t(turns_) * w.dim;
    const size_t hidden = w.hidden, pair = w.beside_norm ? 2 * hidden : 0;
    const size_t sizes[] = {hidden, size_t(width_), size_t(w.heads) * w.dim, wide, turns, turns, both, hidden, pair};
    const size_t rows = std::max<size_t>(plan.rows, plan.wanted.size());
    size_t total = 0;
    for (size_t size : sizes) total += room(rows * size);
    char *at = static_cast<char *>(scratch(kSlot, total));
    char **places[] = {&x_, &qkv_, &seen_, &gated_, &cos_, &sin_, &both_, &branch_, &pair_};
    for (int i = 0; i < 9; i++) *places[i] = at, at += room(rows * sizes[i]);
  }

  void run() {
    embed();
    turns();
    const int last = int(w_.layers.size()) - 1;
    bool all = false;  // whether what leaves the last layer is asked for of all rows
    for (const auto &[point, at] : plan_.states) all |= point == kNormed || point > last;
    for (int i = 0; i <= last; i++) {
      keep(i);
      attend(i, i < last || all);
      if (i < last || all) rest(w_.layers[i], x_, seen_, plan_.rows);
    }
    char *out = static_cast<char *>(plan_.out);
    const int wanted = int(plan_.wanted.size());
    gather(x_, w_.hidden, out);
    if (all) {
      keep(last + 1);
      for (const auto &[point, at] : plan_.states)
        if (point == kNormed) norm(x_, plan_.rows, reinterpret_cast<void *>(at));
    } else if (wanted) {
      gather(seen_, w_.heads * w_.dim, qkv_);
      rest(w_.layers[last], out, qkv_, wanted);
    }
    norm(out, wanted, out);
    if (!plan_.logits) return;
    multiply(w_.head, out, wanted, plan_.logits, w_.vocab, true, nullptr, nullptr);
    choose(wanted);
  }

 private:
  size_t room(size_t count) const { return (count * size_ + 63) / 64 * 64; }

  void embed() {
    const size_t row = size_ * w_.hidden;
    if (plan_.embedded) {
      memcpy(x_, plan_.embedded, row * plan_.rows);
      return;
    }
    for (int64_t token : plan_.tokens)
      if (token < 0 || token >= w_.vocab) throw std::out_of_range("a token is beyond the vocabulary");
    for (int r = 0; r < plan_.rows; r++) {
      const int64_t token = plan_.tokens[r];
      if (w_.packed)
        unpack_row(*w_.packed, int(token), x_ + r * row);
      else
        memcpy(x_ + r * row, static_cast<const char *>(w_.embedding) + token * row, row);
    }
  }

  void turns() {
    const size_t row = size_ * w_.dim;
    for (int r = 0; r < turns_ * plan_.rows; r++) {
      memcpy(cos_ + r * row, reinterpret_cast<const char *>(plan_.turns[r]), row);
      memcpy(sin_ + r * row, reinterpret_cast<const char *>(plan_.turns[r]) + plan_.sines, row);
    }
  }

  // Of all rows, or of those from each run's first that is wanted: what the others see goes nowhere from the last layer.
  void attend(int i, bool all) {
    const WalkLayer &layer = w_.layers[i];
    if (w_.beside_norm) pair(layer.input_norm);
    multiply(layer.qkv, w_.beside_norm ? pair_ : x_, plan_.rows, qkv_, width_, w_.type == Type::f32, nullptr, w_.beside_norm ? nullptr : layer.input_norm);
    const size_t q_bytes = size_ * w_.heads * w_.dim, turn = size_ * w_.dim * plan_.rows * layer.turn;
    const bool each = !w_.full_norms;
    for (int r = 0; r < plan_.rows && !each; r++) {
      char *q = qkv_ + r * size_ * width_, *k = q + q_bytes;
      kernels().elementwise.rms_norm(q, 1, w_.heads * w_.dim, layer.q_norm, w_.eps, q, w_.type, 1);
      kernels().elementwise.rms_norm(k, 1, w_.kv_heads * w_.dim, layer.k_norm, w_.eps, k, w_.type, 1);
    }
    kernels().elementwise.rope(qkv_, plan_.rows, width_, w_.heads + w_.kv_heads, w_.heads, w_.dim, cos_ + turn, sin_ + turn,
                               each ? layer.q_norm : nullptr, each ? layer.k_norm : nullptr, w_.eps, w_.type, plan_.threads);
    if (plan_.queries) {
      char *to = static_cast<char *>(plan_.queries) + i * plan_.rows * q_bytes;
      for (int r = 0; r < plan_.rows; r++) memcpy(to + r * q_bytes, qkv_ + r * size_ * width_, q_bytes);
    }
    const AttentionShape shape{w_.heads,     w_.kv_heads, w_.dim,  width_,  width_,       width_,
                               layer.window, w_.scale,    w_.softcap, layer.sinks, w_.type, plan_.threads};
    jobs_.clear();
    for (const WalkRun &run : plan_.runs) {
      jobs_.push_back(job(run, i));
      if (!all) jobs_.back().first = first(run);
    }
    kernels().attention.attend(shape, jobs_.data(), int(jobs_.size()));
  }

  void choose(int wanted) const {
    pool::parallel(wanted, plan_.threads, [&](int r) {  // also of few rows, as the threads are awake
      Draw own = plan_.draws.empty() ? Draw{} : plan_.draws[r];
      own.logits = plan_.logits + size_t(r) * w_.vocab;
      if (own.temperature) plan_.best[r] = draw(own, w_.vocab);
      else kernels().elementwise.argmax(own.logits, 1, w_.vocab, plan_.best + r, 1);
    });
  }

  // What qkv sees of rows that have something beside them.
  void pair(const void *norm) {
    const size_t row = size_ * w_.hidden;
    for (int r = 0; r < plan_.rows; r++) {
      char *to = pair_ + 2 * r * row, *x = x_ + r * row;
      kernels().elementwise.rms_norm(static_cast<const char *>(plan_.beside) + r * row, 1, w_.hidden, w_.beside_norm, w_.eps, to, w_.type, 1);
      kernels().elementwise.rms_norm(x, 1, w_.hidden, norm, w_.eps, to + row, w_.type, 1);
      if (w_.normed) memcpy(x, to + row, row);
    }
  }

  AttentionJob job(const WalkRun &run, int layer) const {
    char *q = qkv_ + run.row * size_ * width_, *keys = q + size_ * w_.heads * w_.dim;
    return {q, keys, keys + size_ * w_.kv_heads * w_.dim, seen_ + run.row * size_ * w_.heads * w_.dim,
            run.table ? nullptr : reinterpret_cast<void *>(run.stores[layer]), run.capacity, run.start, run.n,
            run.tree ? run.parents.data() : nullptr, plan_.slabs + layer * plan_.slab_count, run.table};
  }

  int64_t first(const WalkRun &run) const {
    int64_t row = run.n;
    for (int wanted : plan_.wanted)
      if (wanted >= run.row) row = std::min(row, wanted - run.row);
    return row;
  }

  // What follows attention, in place: x (rows, hidden).
  void rest(const WalkLayer &layer, char *x, const char *seen, int rows) {
    branch(x, rows, layer.attention_norm, [&](char *y, const char *residual) {
      multiply(layer.o, seen, rows, y, w_.hidden, w_.type == Type::f32, residual, nullptr);
    });
    branch(x, rows, layer.mlp_norm, [&](char *y, const char *residual) {
      if (layer.experts) return mix(*layer.experts, x, rows, layer.post_norm, w_.eps, residual, y, plan_.threads);
      const int wide = layer.down[0]->inputs;
      const bool gated = layer.gate_up[0]->gated;
      multiply(layer.gate_up, x, rows, gated ? gated_ : both_, gated ? wide : 2 * wide, w_.type == Type::f32, nullptr, layer.post_norm);
      if (!gated) kernels().elementwise.gate(both_, rows, wide, w_.gate, gated_, w_.type, plan_.threads);
      multiply(layer.down, gated_, rows, y, w_.hidden, w_.type == Type::f32, residual, nullptr);
    });
  }

  // Adds to x what `compute(y, residual)` gives, normed if there is a norm behind it.
  template <class F>
  void branch(char *x, int rows, const void *norm, F compute) {
    if (!norm && w_.residual == 1) return compute(x, x);
    compute(branch_, nullptr);
    if (norm) kernels().elementwise.rms_norm(branch_, rows, w_.hidden, norm, w_.eps, branch_, w_.type, plan_.threads);
    kernels().elementwise.add(x, branch_, int64_t(rows) * w_.hidden, w_.residual, w_.type, plan_.threads);
  }

  void multiply(const Product &product, const void *x, int rows, void *y, int stride, bool y_float,
                const void *residual, const void *norm) const {
    char *to = static_cast<char *>(y);
    const char *added = static_cast<const char *>(residual);
    for (const Weights *part : product) {
      kernels().linear.linear(*part, x, rows, to, stride, y_float, added, norm, w_.eps, plan_.threads);
      to += part->width() * (y_float ? 4 : size_);
      if (added) added += part->width() * size_;
    }
  }

  void norm(const void *x, int rows, void *y) const {
    kernels().elementwise.rms_norm(x, rows, w_.hidden, w_.norm, w_.eps, y, w_.type, plan_.threads);
  }

  // The rows that are wanted, of so many numbers.
  void gather(const char *from, int width, char *to) const {
    const size_t row = size_ * width;
    for (int r : plan_.wanted) memcpy(to, from + r * row, row), to += row;
  }

  void keep(int point) const {
    for (const auto &[asked, at] : plan_.states)
      if (asked == point) memcpy(reinterpret_cast<void *>(at), x_, size_ * w_.hidden * plan_.rows);
  }

  const Walk &w_;
  const WalkPlan &plan_;
  const size_t size_;
  const int width_;  // of qkv
  int turns_;        // rotations
  char *x_, *qkv_, *seen_, *gated_, *cos_, *sin_, *both_, *branch_, *pair_;
  std::vector<AttentionJob> jobs_;
};

}  // namespace

void walk(const Walk &w, const WalkPlan &plan) {
  if (plan.rows) Step(w, plan).run();
}
