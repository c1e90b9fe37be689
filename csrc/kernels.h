// The kernels of one instruction set, as a table of functions. Every file that is compiled once per instruction set
// (see CMakeLists.txt) lives in a namespace of its own, named by OUTRIDER_ISA.
//
// Such files use no templates of the standard library: the linker keeps one copy of each, and it might be the one that
// this processor cannot run.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"

struct Kernels {
  const char *name;
  AttentionKernels attention;
  LinearKernels linear;
  ElementwiseKernels elementwise;
};

// The table in use: the best instruction set that this processor has and whose self-check passed, or the forced one.
const Kernels &kernels();
