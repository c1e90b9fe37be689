#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace pool {
namespace {

constexpr int kSpins = 4000;  // some 50 us: the next product of a forward comes sooner

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Floats as the standard has them, for as long as it lasts: a thread may have been told to flush what is small to zero,
// and another not, and who takes a task is chance.
class Usual {
 public:
  Usual() {
    if (unusual(before_)) set(usual());
  }
  ~Usual() {
    if (unusual(before_)) set(before_);
  }

 private:
#if defined(__x86_64__)
  using Word = unsigned;
  static constexpr Word kFlags = 0x3f;  // what has happened, not what is to
  static Word usual() { return 0x1f80; }
  static Word get() { return __builtin_ia32_stmxcsr(); }
  static void set(Word word) { __builtin_ia32_ldmxcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlags = 0;
  static Word usual() { return 0; }
  static Word get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set(Word word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = int;
  static constexpr Word kFlags = 0;
  static Word usual() { return 0; }
  static Word get() { return 0; }
  static void set(Word) {}
#endif
  static bool unusual(Word word) { return (word & ~kFlags) != usual(); }
  const Word before_ = get();
};

// Workers wait for a round that counts them in, then take tasks while there are any. It is over when its caller has closed
// it and no worker is inside: one that another process keeps from its core is not waited for. With many threads a round
// costs what goes between cores. So all spin on one line, which the caller alone writes, and each worker writes its own: a
// line that all of them wrote would go from core to core, one after another.
class Pool {
 public:
  void run(int tasks, int threads, Task task, void *context) {
    const Usual usual;
    threads = std::min({threads, tasks, kMost});
    if (threads <= 1 || busy_.exchange(true, std::memory_order_acquire)) {
      for (int i = 0; i < tasks; i++) task(context, i);
      return;
    }
    const int helpers = hire(threads - 1);
    for (int i = 0, shares = helpers + 1; i < shares; i++) {
      Share &share = share_of(i);
      share.next.store(int(int64_t(tasks) * i / shares), std::memory_order_relaxed);
      share.end = int(int64_t(tasks) * (i + 1) / shares);
    }
    const uint64_t closed = (round_.load(std::memory_order_relaxed) / kMost + 1) * kMost;
    task_ = task;
    context_ = context;
    shares_ = helpers + 1;
    round_.store(closed + helpers);
    drain(0);
    round_.store(closed);
    for (int i = 0; i < helpers; i++)
      while (workers_[i]->inside.load()) relax();
    const std::exception_ptr error = std::exchange(error_, nullptr);
    if (error) failed_.store(false, std::memory_order_relaxed);
    busy_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

 private:
  static constexpr int kMost = 1 << 16;  // threads

  // Neighbouring tasks, which a thread takes in order: what it fetched ahead is then of use to itself.
  struct alignas(64) Share {
    std::atomic<int> next{0};
    int end = 0;
  };

  struct Worker : Share {
    std::atomic<bool> inside{false};             // on the share's line, which caller and worker write anyway
    alignas(64) std::atomic<bool> asleep{false};  // on one that is seldom written
    std::mutex mutex;
    std::condition_variable awake;

    void wake() {
      if (!asleep.load()) return;  // sequentially consistent with wait(): there the round is seen, or here who sleeps
      std::lock_guard<std::mutex> lock(mutex);
      asleep.store(false);
      awake.notify_one();
    }

    template <class F>
    void wait(F called) {
      for (;;) {
        for (int i = 0; i < kSpins; i++) {
          if (called()) return;
          relax();
        }
        std::unique_lock<std::mutex> lock(mutex);
        asleep.store(true);
        if (called()) asleep.store(false);
        awake.wait(lock, [&] { return !asleep.load(); });
      }
    }
  };

  // Up to so many workers: as many as the system lets us have, for a task does not care.
  int hire(int wanted) {
    try {
      while (int(workers_.size()) < wanted) {
        workers_.reserve(workers_.size() + 1);  // before the thread is there: what follows cannot fail
        auto worker = std::make_unique<Worker>();
        std::thread([this, w = worker.get(), own = int(workers_.size()) + 1] { work(*w, own); }).detach();
        workers_.push_back(std::move(worker));
      }
    } catch (const std::bad_alloc &) {
    } catch (const std::system_error &) {
    }
    return std::min(wanted, int(workers_.size()));
  }

  void work(Worker &worker, int own) {
    const Usual usual;
    for (uint64_t round = 0;;) {
      worker.wait([&, seen = round] { return (round = round_.load()) != seen && own <= int(round % kMost); });
      worker.inside.store(true);  // sequentially consistent with run(): there who is inside is seen, or here the closing
      if (round_.load() == round) drain(own);
      worker.inside.store(false, std::memory_order_release);
    }
  }

  Share &share_of(int i) { return i ? *workers_[i - 1] : share_; }

  // Wakes two more, so that a call of many takes the logarithm of their number; takes the tasks of a thread's own share,
  // then what is left of the others'.
  void drain(int own) {
    for (int i = 2 * own + 1; i <= 2 * own + 2 && i < shares_; i++) workers_[i - 1]->wake();
    try {
      for (int i = 0; i < shares_; i++) {
        Share &share = share_of((own + i) % shares_);
        while (share.next.load(std::memory_order_relaxed) < share.end && !failed_.load(std::memory_order_relaxed)) {
          const int task = share.next.fetch_add(1, std::memory_order_relaxed);
          if (task < share.end) task_(context_, task);
        }
      }
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
    }
  }

  std::atomic<bool> busy_{false};
  std::vector<std::unique_ptr<Worker>> workers_;
  Share share_;  // the caller's
  alignas(64) std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // of the task that failed first
  // On one line, which brings a worker all of it: the round's number times kMost, plus how many workers it counts in (none
  // once it is closed), and what is to be done.
  alignas(64) std::atomic<uint64_t> round_{0};
  Task task_ = nullptr;
  void *context_ = nullptr;
  int shares_ = 0;
};

// Never destroyed: its threads may outlive the statics. A forked child has none of them and starts anew.
std::atomic<Pool *> instance{nullptr};

Pool &get() {
  if (Pool *pool = instance.load(std::memory_order_acquire)) return *pool;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!instance.load()) {
    static const int once = pthread_atfork(nullptr, nullptr, [] { instance.store(nullptr); });
    (void)once;
    instance.store(new Pool);
  }
  return *instance.load();
}

}  // namespace

void run(int tasks, int threads, Task task, void *context) { get().run(tasks, threads, task, context); }

}  // namespace pool
