// Max pooling's loops over a block of rows, as a table of functions for each ISA. max_pool.cc cuts tensors into blocks and
// runs them on threads; max_pool_loops.h is the loops.
#pragma once

#include <cstdint>

#include "element.h"

namespace jaxfuse::max_pool {

struct Range {
  int64_t begin, end;
};

// One spatial dimension. Window `o` covers the inputs o·stride - padding_low + [0, window).
struct Axis {
  int64_t in, out, window, stride, padding_low;
  const Range* windows_of;  // for each input, the windows that cover it; backward only
};

// Tensors are f32, bf16 or f16, row-major (batch, three spatial dimensions, channels). `winners` is like y: for each window the
// position in it, counted row by row, of the value that its gradient goes to.
struct Args {
  Element element;
  bool wide_winners;  // int32, for windows of more positions than a byte can tell apart; else uint8
  int64_t channels;
  Axis axes[3];
  const void* in;  // x or dy
  void* winners;   // written by forward unless null, read by backward
  void* out;       // y or dx
};

// Rows (along the first spatial dimension) of the result for one entry of the batch.
struct Block {
  int64_t entry;
  Range rows;
};

struct Kernels {
  // y = the largest of each window, -inf where it lies in the padding, NaN where it holds one
  void (*forward)(const Args&, const Block&);
  // dx = Σ dy of the windows in which x is the winner
  void (*backward)(const Args&, const Block&);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::max_pool
