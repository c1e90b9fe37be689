#include "scratch.h"

#include <cstdlib>
#include <new>

namespace {

struct Slot {
  void *memory = nullptr;
  size_t size = 0;
  ~Slot() { free(memory); }
};

thread_local Slot slots[10];

}  // namespace

void *scratch(int slot, size_t bytes) {
  Slot &s = slots[slot];
  if (s.size < bytes) {
    free(s.memory);
    s.size = (bytes + 4095) / 4096 * 4096;
    s.memory = aligned_alloc(4096, s.size);
    if (!s.memory) {
      s.size = 0;
      throw std::bad_alloc();
    }
  }
  return s.memory;
}
