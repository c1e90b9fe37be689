// The kernels of one instruction set, as a table of functions. Every file that is compiled once per instruction set
// (see CMakeLists.txt) lives in a namespace of its own, named by OUTRIDER_ISA.
//
// Such files use no templates of the standard library: the linker keeps one copy of each, and it might be the one that
// this processor cannot run. And nothing in them is computed while the module is loaded: that would run on every
// processor. The tables are constexpr, so the compiler holds them to it.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

struct Kernels {
  const char *name;
  const AttentionKernels &attention;
  const LinearKernels &linear;
  const ElementwiseKernels &elementwise;
};

// The table in use: the best instruction set that this processor has and whose self-check passed, or the forced one.
const Kernels &kernels();
