#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
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

// Workers wait for `round` to grow, then take tasks while there are any. A round is over when its caller has closed the
// gate and all workers that came in before have left: one that another process keeps from its core is not waited for.
class Pool {
 public:
  void run(int tasks, int threads, Task task, void *context) {
    if (threads > tasks) threads = tasks;
    if (threads <= 1 || busy_.exchange(true, std::memory_order_acquire)) {
      for (int i = 0; i < tasks; i++) task(context, i);
      return;
    }
    const int helpers = hire(threads - 1);
    task_ = task;
    context_ = context;
    shares_ = helpers + 1;
    for (int i = 0; i < shares_; i++) {
      Share &share = share_of(i);
      share.next.store(int(int64_t(tasks) * i / shares_), std::memory_order_relaxed);
      share.end = int(int64_t(tasks) * (i + 1) / shares_);
    }
    gate_.fetch_sub(kClosed, std::memory_order_acq_rel);  // a late worker may be on its way out: no plain store
    for (int i = 0; i < helpers; i++) workers_[i]->call();
    drain(0);
    gate_.fetch_or(kClosed, std::memory_order_acq_rel);
    while (gate_.load(std::memory_order_acquire) != kClosed) relax();
    const std::exception_ptr error = std::exchange(error_, nullptr);
    failed_.store(false, std::memory_order_relaxed);
    busy_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

 private:
  // Neighbouring tasks, which a thread takes in order: what it fetched ahead is then of use to itself.
  struct alignas(64) Share {
    std::atomic<int> next{0};
    int end = 0;
  };

  struct Worker {
    Share share;
    std::atomic<unsigned> round{0};
    std::atomic<bool> asleep{false};
    std::mutex mutex;
    std::condition_variable wake;

    void call() {
      round.fetch_add(1);
      if (asleep.load()) {  // sequentially consistent with wait(): one of the two sees the other's store
        std::lock_guard<std::mutex> lock(mutex);
        wake.notify_one();
      }
    }

    void wait(unsigned seen) {
      for (int i = 0; i < kSpins; i++) {
        if (round.load(std::memory_order_acquire) != seen) return;
        relax();
      }
      std::unique_lock<std::mutex> lock(mutex);
      asleep.store(true);
      wake.wait(lock, [&] { return round.load() != seen; });
      asleep.store(false);
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
    for (unsigned seen = 0;;) {
      worker.wait(seen);
      seen = worker.round.load();
      if (gate_.fetch_add(1, std::memory_order_acq_rel) < kClosed) drain(own);
      gate_.fetch_sub(1, std::memory_order_release);
    }
  }

  Share &share_of(int i) { return i ? workers_[i - 1]->share : share_; }

  // Takes the tasks of a thread's own share, then what is left of the others'.
  void drain(int own) {
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
  Task task_ = nullptr;
  void *context_ = nullptr;
  int shares_ = 0;
  Share share_;  // the caller's
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // of the task that failed first
  static constexpr unsigned kClosed = 1u << 30;
  alignas(64) std::atomic<unsigned> gate_{kClosed};  // how many workers are inside, plus kClosed
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
