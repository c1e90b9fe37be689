// Many callers at once in the pool and in the kernels, for the thread sanitizer (`make sanitize`): each result must be
// what one thread alone computes, and a task that throws must reach its caller and no other.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "pool.h"

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
    const int size = 1 + (round * 7 + caller) % 60, bad = round % 3 ? -1 : size / 2;
    std::vector<int> done(size);  // each task writes its own place, which the caller reads afterwards
    bool thrown = false;
    try {
      pool::parallel(size, 1 + round % 4, [&](int i) {
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

void linear(int caller) {
  constexpr int kOutputs = 640, kInputs = 96, kRows = 70;
  static const std::vector<uint16_t> plain = numbers(kOutputs * kInputs), x = numbers(kRows * kInputs);
  static const std::vector<uint16_t> norm = numbers(kInputs);
  Weights w{kBF16, kOutputs, kInputs, 32, false, nullptr, {}, {}, nullptr, nullptr};
  std::vector<char> packed(w.panels() * w.panel_bytes());
  pack_weights(w, plain.data(), packed.data(), 3);
  w.data = packed.data();
  std::vector<float> alone(kRows * kOutputs), y(kRows * kOutputs);
  for (int round = 0; round < 4; round++) {
    const int rows = 1 + (caller * 5 + round * 23) % kRows;
    kernels().linear.linear(w, x.data(), rows, alone.data(), kOutputs, true, nullptr, norm.data(), 1e-5f, 1);
    kernels().linear.linear(w, x.data(), rows, y.data(), kOutputs, true, nullptr, norm.data(), 1e-5f, 4);
    expect(!memcmp(alone.data(), y.data(), sizeof(float) * rows * kOutputs), "linear is the same on several threads");
  }
}

void attention(int caller) {
  constexpr int kHeads = 6, kKvHeads = 2, kDim = 64, kCapacity = 3072, kNew = 20;
  const std::vector<uint16_t> q = numbers(kNew * kHeads * kDim), fresh = numbers(2 * kNew * kKvHeads * kDim);
  std::vector<uint16_t> store = numbers(2 * kKvHeads * kCapacity * kDim);
  std::vector<uint16_t> alone(q.size()), out(q.size());
  for (int round = 0; round < 3; round++) {
    const int64_t start = 700 * round + 13 * caller;
    AttentionShape shape{kHeads, kKvHeads, kDim, kHeads * kDim, kKvHeads * kDim, kKvHeads * kDim, 0, 0.125f, 0, nullptr,
                         Type::bf16, Type::bf16, 1};
    AttentionJob job{q.data(), fresh.data(), fresh.data() + fresh.size() / 2, alone.data(), store.data(), nullptr,
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
    callers(3, attention);
    printf("%s\n", found[i]->name);
  }
}
