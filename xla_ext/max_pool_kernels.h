// Max pooling's loops over a block of rows, as a table of functions for each ISA. max_pool.cc cuts tensors into blocks and
// runs them on threads; max_pool_loops.h is the loops.
#pragma once

#include <cstdint>

#include "simd_level.h"

namespace jaxfuse::max_pool {

struct Range {
  int64_t begin, end;
};

// One spatial dimension. Window `o` covers the inputs o·stride - padding_low + [0, window).
struct Axis {
  int64_t in, out, window, stride, padding_low;
  const Range* windows_of;  // for each input, the windows that cover it; backward only
};

// Tensors are f32 or bf16, row-major (batch, three spatial dimensions, channels).
struct Args {
  bool bf16;
  int64_t channels;
  Axis axes[3];
  const void* x;
  const void* dy;  // backward only
  void* result;    // y or dx
};

// Rows (along the first spatial dimension) of the result for one item of the batch.
struct Block {
  int64_t item;
  Range rows;
};

// The winners of a window fill whole vectors.
inline int64_t winners_per_window(int64_t channels) {
  return (channels + kWidestVector - 1) / kWidestVector * kWidestVector;
}

struct Kernels {
  // y = the largest of each window, -inf where it lies in the padding, NaN where it holds one
  void (*forward)(const Args&, const Block&);
  // dx = Σ dy of the windows in which x is the winner; `winners` has room for those of every window that touches the rows
  void (*backward)(const Args&, const Block&, int32_t* winners);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::max_pool
