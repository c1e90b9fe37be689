#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pool.h"
#include "scratch.h"

namespace {

constexpr int kSlot = 9;  // of scratch memory
constexpr int kTaskBytes = 1 << 19;

struct Task {
  const Weights *weights;
  int first, last;  // panels
  const char *x;
  int rows;
  char *y;
  int stride;
};

class Step {
 public:
  Step(const Mixture &m, int rows, int threads)
      : m_(m), rows_(rows), threads_(threads), each_(m.chosen + m.shared), all_(rows * each_),
        size_(size_of(m.type)), scores_count_(int(m.experts.size())) {
    const size_t sizes[] = {size_ * rows * m.hidden,    sizeof(float) * rows * scores_count_, size_ * all_ * m.hidden,
                            size_ * all_ * 2 * m.width, size_ * all_ * m.width,               sizeof(float) * all_ * m.hidden};
    size_t total = 0;
    for (size_t size : sizes) total += (size + 63) / 64 * 64;
    char *at = static_cast<char *>(scratch(kSlot, total));
    char **places[] = {&normed_, &scores_, &gathered_, &both_, &inner_, &out_};
    for (int i = 0; i < 6; i++) *places[i] = at, at += (sizes[i] + 63) / 64 * 64;
  }

  void run(const void *x, const void *norm, float eps, const void *residual, void *y) {
    if (norm)
      kernels().elementwise.rms_norm(x, rows_, m_.hidden, norm, eps, normed_, m_.type, threads_);
    else
      memcpy(normed_, x, size_ * rows_ * m_.hidden);
    route();
    for (const Taken &t : taken_) add(m_.experts[t.expert].gate_up, t, gathered_, m_.hidden, size_, true);
    multiply(false);
    for (const Taken &t : taken_) {
      const Expert &e = m_.experts[t.expert];
      if (!e.gate_up[0]->gated) {
        const int width = e.down[0]->inputs;
        kernels().elementwise.gate(both_ + size_ * t.begin * 2 * m_.width, t.rows, width, m_.gate,
                                   inner_ + size_ * t.begin * m_.width, m_.type, threads_);
      }
      add(e.down, t, inner_, m_.width, sizeof(float), false);
      m_.read.fetch_add(e.bytes, std::memory_order_relaxed);
    }
    multiply(true);
    kernels().elementwise.combine(reinterpret_cast<float *>(out_), places_.data(), weights_.data(), rows_, each_, m_.hidden,
                                  residual, y, m_.type, threads_);
  }

 private:
  struct Taken {  // an expert and its rows, which lie one behind the other
    int expert, begin, rows;
  };

  void route() {
    char *to = scores_;
    for (const Weights *part : m_.router) {
      kernels().linear.linear(*part, normed_, rows_, to, scores_count_, true, nullptr, nullptr, 0, threads_);
      to += sizeof(float) * part->width();
    }
    std::vector<int> experts(all_), next(m_.experts.size() + 1);
    weights_.resize(all_), places_.resize(all_);
    for (int r = 0; r < rows_; r++)
      ::route(reinterpret_cast<float *>(scores_) + size_t(r) * scores_count_, scores_count_, m_.chosen, m_.normalised,
              m_.shared, &experts[r * each_], &weights_[r * each_]);
    for (int e : experts) next[e + 1]++;
    for (size_t e = 0; e < m_.experts.size(); e++) {
      if (next[e + 1]) taken_.push_back({int(e), next[e], next[e + 1]});
      next[e + 1] += next[e];
    }
    const size_t row = size_ * m_.hidden;
    for (int i = 0; i < all_; i++) {
      places_[i] = next[experts[i]]++;
      memcpy(gathered_ + places_[i] * row, normed_ + i / each_ * row, row);
    }
  }

  // The tasks of one expert's product, whose rows of x have room for `width` numbers each.
  void add(const Product &product, const Taken &t, const char *x, int width, size_t y_size, bool inner) {
    int stride = 0, done = 0;
    for (const Weights *part : product) stride += part->width();
    const bool gated = product[0]->gated;
    char *y = !inner ? out_ + y_size * t.begin * m_.hidden
              : gated ? inner_ + y_size * t.begin * m_.width
                      : both_ + y_size * t.begin * 2 * m_.width;
    for (const Weights *part : product) {
      const int fair = int(part->panels() * taken_.size()) / (4 * threads_);
      const int together = std::max(1, std::min(fair, int(kTaskBytes / part->panel_bytes())));
      for (int first = 0; first < part->panels(); first += together)
        tasks_.push_back({part, first, std::min(first + together, part->panels()), x + size_ * t.begin * width, t.rows,
                          y + y_size * (done + first * part->step()), stride});
      done += part->width();
    }
  }

  void multiply(bool floats) {
    pool::parallel(int(tasks_.size()), threads_, [&](int i) {
      const Task &t = tasks_[i];
      const Weights w = part_of(*t.weights, t.first, t.last);
      kernels().linear.linear(w, t.x, t.rows, t.y, t.stride, floats || m_.type == Type::f32, nullptr, nullptr, 0, 1);
    });
    tasks_.clear();
  }

  const Mixture &m_;
  const int rows_, threads_, each_, all_;  // each_: experts of a row; all_: rows of all experts
  const size_t size_;
  const int scores_count_;
  char *normed_, *scores_, *gathered_, *both_, *inner_, *out_;
  std::vector<int> places_;
  std::vector<float> weights_;
  std::vector<Taken> taken_;
  std::vector<Task> tasks_;
};

// NaN is the largest, so that it is not passed over.
bool above(float score, float other) { return score > other || (std::isnan(score) && !std::isnan(other)); }

}  // namespace

void route(const float *scores, int all, int chosen, bool normalised, bool shared, int *experts, float *weights) {
  const int count = all - shared;
  for (int j = 0; j < chosen; j++) {
    int best = -1;
    for (int e = 0; e < count; e++)
      if (std::find(experts, experts + j, e) == experts + j && (best < 0 || above(scores[e], scores[best]))) best = e;
    experts[j] = best;
  }
  const float top = scores[experts[0]];
  std::sort(experts, experts + chosen);
  float total = 0;
  if (normalised)
    for (int j = 0; j < chosen; j++) total += std::exp(scores[experts[j]] - top);
  else
    for (int e = 0; e < count; e++) total += std::exp(scores[e] - top);
  for (int j = 0; j < chosen; j++) weights[j] = std::exp(scores[experts[j]] - top) / total;
  if (shared) {
    experts[chosen] = count;
    weights[chosen] = 1 / (1 + std::exp(-scores[count]));
  }
}

void mix(const Mixture &m, const void *x, int rows, const void *norm, float eps, const void *residual, void *y, int threads) {
  if (rows) Step(m, rows, threads).run(x, norm, eps, residual, y);
}
