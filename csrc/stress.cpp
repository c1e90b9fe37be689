// Many callers at once in the pool and in the kernels, for the thread sanitizer (`make sanitize`): each result must be
// what one thread alone computes, and a task that throws must reach its caller and no other.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "experts.h"
#include "pool.h"
#include "sampling.h"

namespace {

void expect(bool good, const char *what) {
  if (good) return;
  fprintf(stderr, "wrong: %s\n", what);
  exit(1);
}

void callers(int count, void (*body)(int caller)) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; i++) threads.emplace_back(body, i);
  for (std::thread &thread : threads) thread.join();
}

void tasks(int caller) {
  for (int round = 0; round < 300; round++) {
    if (round % 50 == 49) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // workers fall asleep
    const int size = 1 + (round * 7 + caller) % 60, bad = round % 3 ? -1 : size / 2;
    std::vector<int> done(size);  // each task writes its own place, which the caller reads afterwards
    bool thrown = false;
    try {
      pool::parallel(size, 1 + round % 9, [&](int i) {
        if (i == bad) throw std::bad_alloc();
        done[i]++;
      });
    } catch (const std::bad_alloc &) {
      thrown = true;
    }
    expect(thrown == (bad >= 0), "an exception is its caller's");
    for (int i = 0; i < size; i++) expect(thrown ? done[i] <= 1 : done[i] == 1, "each task runs once");
  }
}

// bfloat16 numbers that differ.
std::vector<uint16_t> numbers(size_t count) {
  std::vector<uint16_t> x(count);
  for (size_t i = 0; i < count; i++) x[i] = uint16_t(0x3f80 + (i * 37 % 256) * 128 % 512 + (i % 2 << 15));
  return x;
}

// Packed weights, and the memory that they lie in: bfloat16, or integers, whose products may be with rounded rows.
struct Packed {
  Weights w;
  std::vector<char> data;
  std::vector<uint16_t> scales;

  Packed(Format format, int outputs, int inputs, bool rounded = false, bool gated = false)
      : w{format, outputs, inputs, 32, gated, nullptr, {}, {}, nullptr, nullptr, rounded},
        data(w.panels() * w.panel_bytes()),
        scales(w.panels() * w.groups() * kPanel, 0x3c00) {  // 1 / 128
    std::vector<int8_t> whole(outputs * inputs);
    for (size_t i = 0; i < whole.size(); i++) whole[i] = int8_t(i * 37 % 15) - 7;
    const std::vector<uint16_t> floats = numbers(whole.size());
    pack_weights(w, w.bits() == 16 ? static_cast<const void *>(floats.data()) : whole.data(), data.data(), 3);
    w.data = data.data();
    w.scales = {Factors::kBfloat, scales.data(), nullptr};
  }
  Packed(const Packed &) = delete;
};

void linear(int caller) {
  constexpr int kOutputs = 640, kInputs = 96, kRows = 70;
  static const std::vector<uint16_t> x = numbers(kRows * kInputs), norm = numbers(kInputs);
  const Packed plain(kBF16, kOutputs, kInputs), half(kF16, kOutputs, kInputs);
  const Packed int8(kI8, kOutputs, kInputs, true), int4(kI4, kOutputs, kInputs, true);
  std::vector<float> alone(kRows * kOutputs), y(kRows * kOutputs);
  for (const Packed *packed : {&plain, &half, &int8, &int4})
    for (int round = 0; round < 4; round++) {
      const int rows = 1 + (caller * 5 + round * 23) % kRows;
      kernels().linear.linear(packed->w, x.data(), rows, alone.data(), kOutputs, true, nullptr, norm.data(), 1e-5f, 1);
      kernels().linear.linear(packed->w, x.data(), rows, y.data(), kOutputs, true, nullptr, norm.data(), 1e-5f, 4);
      expect(!memcmp(alone.data(), y.data(), sizeof(float) * rows * kOutputs), "linear is the same on several threads");
    }
}

// A layer that all callers share: every other expert of integers, whose rows are rounded.
struct Layer {
  static constexpr int kHidden = 64, kWidth = 96, kCount = 6;
  const Packed router{kBF16, kCount, kHidden};
  const Packed up{kBF16, 2 * kWidth, kHidden, false, true}, down{kBF16, kHidden, kWidth};
  const Packed small_up{kI4, 2 * kWidth, kHidden, true, true}, small_down{kI4, kHidden, kWidth, true};
  Mixture m{kHidden, kWidth, Type::bf16, {&router.w}, {}, 2, true, false, {Gate::kSilu, 0, 0}};

  Layer() {
    for (int e = 0; e < kCount; e++) {
      if (e % 2) m.experts.push_back({{&up.w}, {&down.w}, 1});
      else m.experts.push_back({{&small_up.w}, {&small_down.w}, 1});
    }
  }
};

void experts(int caller) {
  static const Layer layer;
  constexpr int kRows = 40;
  std::vector<uint16_t> x = numbers(kRows * Layer::kHidden + caller), alone(x.size()), y(x.size());
  for (int round = 0; round < 4; round++) {
    const int rows = 1 + (caller * 5 + round * 23) % kRows;
    mix(layer.m, x.data() + caller, rows, nullptr, 0, nullptr, alone.data(), 1);
    mix(layer.m, x.data() + caller, rows, nullptr, 0, nullptr, y.data(), 4);
    expect(alone == y, "experts are the same on several threads");
  }
}

void drawing(int caller) {
  constexpr int kVocab = 5000, kRows = 24;
  std::vector<float> logits(kRows * kVocab);
  for (size_t i = 0; i < logits.size(); i++) logits[i] = float(i * 7919 % 4001) / 250;
  std::vector<int> alone(kRows), tokens(kRows);
  const auto token = [&](int row) {
    return draw({logits.data() + row * kVocab, 0.8f, row % 3 == 1 ? 50 : 0, row % 3 == 2 ? 0.9 : 1.0, -INFINITY,
                 uint64_t(row + caller) * 0x9E3779B97F4A7C15},
                kVocab);
  };
  int sure = 0;
  for (int row = 0; row < kRows; row++) sure += (alone[row] = token(row)) != kUnsure;
  expect(sure > kRows / 2, "most draws are beyond doubt");
  for (int round = 0; round < 4; round++) {
    pool::parallel(kRows, 4, [&](int row) { tokens[row] = token(row); });
    expect(alone == tokens, "a draw is the same on several threads");
  }
}

void attention(int caller) {
  constexpr int kHeads = 6, kKvHeads = 2, kDim = 64, kCapacity = 3072, kNew = 20;
  const std::vector<uint16_t> q = numbers(kNew * kHeads * kDim), fresh = numbers(2 * kNew * kKvHeads * kDim);
  std::vector<uint16_t> store = numbers(2 * kKvHeads * kCapacity * kDim);
  std::vector<uint16_t> alone(q.size()), out(q.size());
  for (int round = 0; round < 4; round++) {
    const Type type = round % 2 ? Type::f16 : Type::bf16;
    const int64_t start = 700 * round + 13 * caller;
    AttentionShape shape{kHeads, kKvHeads, kDim, kHeads * kDim, kKvHeads * kDim, kKvHeads * kDim, 0, 0.125f, 0, nullptr,
                         type, 1};
    AttentionJob job{q.data(), fresh.data(), fresh.data() + fresh.size() / 2, alone.data(), store.data(),
                     kCapacity, start, kNew, nullptr, nullptr, nullptr};
    kernels().attention.attend(shape, &job, 1);
    shape.threads = 4, job.out = out.data();
    kernels().attention.attend(shape, &job, 1);
    expect(alone == out, "attention is the same on several threads");
  }
}

}  // namespace

int main() {
  callers(4, tasks);
  const Kernels *found[kMaxIsas];
  for (int i = 0, n = runnable_kernels(found); i < n; i++) {
    use_kernels(found[i]);
    callers(3, linear);
    callers(3, experts);
    callers(3, attention);
    callers(4, drawing);
    printf("%s\n", found[i]->name);
  }
}
