// Chooses the table of kernels for this processor.
#include "dispatch.h"

#include <atomic>
#include <cstring>

#include "isas.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define DECLARE(isa)           \
  namespace isa {              \
  extern const Kernels table;  \
  }
#define LIST(isa) &isa::table,
OUTRIDER_ISAS(DECLARE)

namespace {

const Kernels *const compiled[] = {OUTRIDER_ISAS(LIST)};  // the best first

bool amx() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // amx-bf16, amx-tile, amx-int8
  if ((d & kNeeded) != kNeeded) return false;
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

bool avxvnni() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
#else
  return false;
#endif
}

bool runs(const char *isa) {
  if (!strcmp(isa, "portable")) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!strcmp(isa, "avx2")) return avx2;
  if (!strcmp(isa, "avxvnni")) return avx2 && avxvnni();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (!strcmp(isa, "avx512")) return avx512;
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (!strcmp(isa, "avx512bf16")) return bf16;
  if (!strcmp(isa, "amx")) return bf16 && amx();
#endif
  return false;
}

std::atomic<const Kernels *> chosen{nullptr};

}  // namespace

const Kernels &kernels() { return *chosen.load(std::memory_order_relaxed); }

const Kernels *find_kernels(const char *isa) {
  for (const Kernels *table : compiled)
    if (!strcmp(table->name, isa) && runs(isa)) return table;
  return nullptr;
}

void use_kernels(const Kernels *table) { chosen.store(table); }

int runnable_kernels(const Kernels **found) {
  int n = 0;
  for (const Kernels *table : compiled)
    if (runs(table->name)) found[n++] = table;
  return n;
}
