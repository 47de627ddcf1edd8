// Normalisation over groups: the loops over one task of a tensor, as a table of functions for each ISA. norm.cc cuts tensors
// into tasks and runs them on threads; norm_rows_loops.h and norm_columns_loops.h are the loops.
//
// A tensor is (outer, spatial, groups, length), row-major; statistics are those of each (outer, group). gamma and beta are
// [groups·length], f32.
#pragma once

#include <cstdint>

#include "activation.h"
#include "element.h"

namespace jaxfuse::norm {

struct Extent {
  int64_t outer, spatial, groups, length;

  // No function that the linker might share: this is also included where the compiler may use what a CPU lacks.
  [[gnu::always_inline]] int64_t channels() const { return groups * length; }
  [[gnu::always_inline]] int64_t entry() const { return spatial * channels(); }
};

// Σ(s - mean)² / count is the variance; without centering, mean is 0. rstd = 1/sqrt(var + epsilon), or 1/(sqrt(var) + epsilon).
struct Options {
  Element element;
  Extent extent;
  bool centered, epsilon_outside;
  float epsilon;
  Activation activation;
  Parameters parameters;
  const float *gamma, *beta;
};

struct Forward {
  Options options;
  const void *x, *residual;  // residual or null
  void *y, *sum;             // sum = x + residual, or null
  float *mean, *rstd;        // (outer, groups), or null
  bool stream;               // y and sum past the caches
};

struct Backward {
  Options options;
  const void *dy, *s, *ds;  // s is what was normalised; ds or null, another cotangent of it
  const float *mean, *rstd;
  void* dx;
  bool stream;  // dx
};

// Tasks: rows [begin, end) of the (outer·groups, length) rows where spatial is 1 ...
struct Rows {
  int64_t begin, end;
};
// ... and the groups [begin, end) of one batch entry elsewhere.
struct Columns {
  int64_t entry, begin, end;
};

// Memory of a thread for one task: at least as much as scratch_for() says, in both.
struct Scratch {
  float* floats;
  double* doubles;
};
constexpr int64_t kRowsAtOnce = 8;
// As many as the first-level cache holds of.
[[gnu::always_inline]] inline int64_t rows_at_once(int64_t length) {
  constexpr int64_t kFloats = 4096;
  return length * kRowsAtOnce <= kFloats ? kRowsAtOnce : length * 2 <= kFloats ? 2 : 1;
}
[[gnu::always_inline]] inline int64_t scratch_for(const Extent& extent) {
  const int64_t rows = (rows_at_once(extent.length) + 1) * extent.length + 2 * extent.channels();
  return rows > 6 * extent.channels() ? rows : 6 * extent.channels();
}

struct Kernels {
  // y = activation((s - mean)·rstd·gamma + beta), s = x + residual
  void (*forward_rows)(const Forward&, Rows, Scratch);
  void (*forward_columns)(const Forward&, Columns, Scratch);
  // dx = the gradient of s, plus ds; of g = dy·activation', Σg·(s - mean)·rstd and Σg for each channel over what the task
  // covers: [groups·length] for rows, [end - begin]·length for columns. null: not wanted.
  void (*backward_rows)(const Backward&, Rows, float* dgamma, float* dbeta, Scratch);
  void (*backward_columns)(const Backward&, Columns, float* dgamma, float* dbeta, Scratch);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::norm
