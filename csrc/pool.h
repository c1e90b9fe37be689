// A pool of threads of our own: PyTorch bundles its own OpenMP runtime, and two of them would fight for the cores.
#pragma once

#include <type_traits>

namespace pool {

using Task = void (*)(void *context, int task);

// Runs task(context, i) for i in [0, tasks) on up to `threads` threads, the caller being one of them, and returns when
// all are done. A thread takes neighbouring tasks in order and then what others have left, but which they are is left
// open: a task must not care. Called while another thread (or a task) is inside, it does all the work itself. If a task
// throws, no further one is begun, and the first exception is thrown here once no thread is inside any more.
void run(int tasks, int threads, Task task, void *context);

// The same for a callable f(task).
template <class F>
void parallel(int tasks, int threads, F &&f) {
  using Callable = std::remove_reference_t<F>;
  run(tasks, threads, [](void *context, int task) { (*static_cast<Callable *>(context))(task); }, const_cast<void *>(static_cast<const void *>(&f)));
}

}  // namespace pool
