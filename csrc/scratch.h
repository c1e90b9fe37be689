#pragma once

#include <cstddef>

// At least `bytes` of this thread's memory, aligned to a cache line, kept until it ends. What the same slot held
// before is lost.
void *scratch(int slot, size_t bytes);
