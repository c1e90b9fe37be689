// Which instruction sets were compiled, which run here, and which is in use.
#pragma once

#include "kernels.h"

constexpr int kMaxIsas = 8;

// The table of an instruction set; null if it was not compiled or this processor does not have it.
const Kernels *find_kernels(const char *isa);
// All that run here, the best first; returns how many. `found` has room for kMaxIsas.
int runnable_kernels(const Kernels **found);
void use_kernels(const Kernels *table);
