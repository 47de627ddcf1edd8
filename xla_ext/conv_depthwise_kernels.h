// The loops of a depthwise convolution, as a table of functions for each ISA. conv_depthwise.cc cuts tensors into pieces
// and runs them on threads; conv_depthwise_loops.h is the loops.
#pragma once

#include <cstdint>

namespace jaxfuse::conv::depthwise {

// Every `step`-th output of the last dimension, from `first` on, and what output number j of them reads: tap
// first_tap + t·tap_step the input in_first + j·in_step + t·spacing, for t < taps.
struct Phase {
  int64_t first, step, in_first, in_step, spacing, first_tap, tap_step, taps;
};

// Tensors are row-major (batch, spatial dimensions, channels); the filter is f32 (spatial dimensions, channels).
struct Args {
  bool bf16;
  int64_t channels;
  int64_t in, taps;  // of the last dimension
  const Phase* phases;
  int64_t n_phases;
  int64_t out_step;  // from an output to the next, in elements
};

// A row of the filter, the number of its first tap, and the row of x that it lies over.
struct Row {
  const void* x;
  int64_t tap;
};

// Outputs [begin, end) of the last dimension, in one row, and the rows of the filter that lie over data.
struct Piece {
  int64_t begin, end;
  const Row* rows;
  int64_t n_rows;
  const void* next;  // the row of x behind these, to be fetched already, or null
};

// z itself, or ends[0] from bounds[0] down and ends[1] from bounds[1] up.
struct Clip {
  float bounds[2], ends[2];
};

// Where bias (or null: zeros) + Σ w·x goes: into sums or, where that is null, clipped and rounded to x's dtype into y. Both point
// to the first output.
struct Output {
  const float* bias;
  float* sums;
  void* y;
  Clip clip;
};

// A line of outputs whose inputs are all in memory, zeros for padding: the pixels of x, and the taps of w, lie `line_step` apart. Rows point
// to the first input of the first output. As many further outputs as fill up kTogether are read, not written.
constexpr int kTogether = 8;

struct Line {
  const Row* rows;
  int64_t n_rows;
  int64_t taps, stride;  // 3, 5 or 7, and 1 or 2
  int64_t outputs, channels;
  const float* w;
  const float* bias;  // or null
  float low, high;    // limits of what a sum becomes; NaN stays NaN
  float* y;
  int64_t out_step;
};

struct Kernels {
  // The outputs of a piece.
  void (*convolve)(const Args&, const Piece&, const float* w, const Output&);
  // sums += Σ g·x for each tap, db (or null) += Σ g, over the outputs of a piece and channels [begin, end); g is like x
  // and points to the first output, sums is like the filter. There is one phase with every tap.
  void (*filter_gradient)(const Args&, const Piece&, int64_t begin, int64_t end, const void* g, float* sums, float* db);
  void (*convolve_line)(const Line&);
  // to[0, line_step) = channels of a tap, and zeros; whether they are finite.
  bool (*copy_tap)(const float* from, int64_t channels, float* to);
  int64_t line_step;  // the most channels of such a line
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::conv::depthwise
