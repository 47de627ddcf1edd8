// What both of attention's targets are told, checked, and how tiles of its matrices are multiplied.
#pragma once

#include <optional>

#include "attention_kernels.h"
#include "handler.h"
#include "parallel.h"
#include "product.h"

namespace jaxfuse::attention {

using product::Matrix;

// Our loops for this machine.
const Kernels& kernels();

using product::kColumns, product::kMostRows;

inline int64_t parts(int64_t extent, int64_t size) { return (extent + size - 1) / size; }
inline int64_t padded(int64_t extent, int64_t unit) { return parts(extent, unit) * unit; }

// y = (softmax(scale·q·kᵀ + bias)·factor)·v for each of the batch: q is [rows, inner], k [keys, inner], v [keys, columns],
// y [rows, columns]; the factor, if there is one, is elementwise. Where the mask is 0 a score is `fill`.
struct Problem {
  Shape batch;
  int64_t rows, keys, inner, columns;
  float scale, fill;
  Matrix q, k, v;
  std::optional<Matrix> bias, mask, factor;

  // From the operands q, k, v, then bias, mask and factor where attributes say so.
  explicit Problem(const Call&);

  int64_t items() const { return size_of(batch); }
  size_t operands() const { return 3 + bias.has_value() + mask.has_value() + factor.has_value(); }
  // The tensor's matrices, [extents...] each, laid as the attribute says.
  Matrix matrix(const Call&, const Tensor&, const char* strides, const Shape& extents) const;
  // The same, to be written: one matrix for each item of the batch, the columns side by side.
  Matrix written(const Call&, const Tensor&, const char* strides, const Shape& extents) const;
  Scores scores(int64_t item, int64_t row, int64_t rows, int64_t key, int64_t keys, float* s, int64_t stride) const;
};

// f(task) for all tasks, on threads unless they are less work than waking these.
template <class F>
void for_tasks(const Problem& p, int64_t tasks, F f) {
  constexpr int64_t kFewProducts = 1 << 17;
  const bool few = p.items() * p.rows * p.keys * (p.inner + p.columns) < kFewProducts;
  parallel_for(few ? 1 : tasks, [&](int64_t task) {
    for (int64_t i = few ? 0 : task, end = few ? tasks : task + 1; i < end; ++i) f(i);
  });
}

// Lines of a tile to be multiplied: element k of line i at data + i·line + k·step, but from a tile's lines to the next's `group` further.
struct Lines {
  const float* data;
  int64_t line, step, group;
};

// The rows of a matrix, where they lie or in memory of padded(rows, kMostRows) times inner.
Lines lines_of(const Matrix&, int64_t rows, int64_t inner, float* memory);
bool lies_in_lines(const Matrix&);

// A matrix's columns, or its rows, as panels of kColumns, for multiply() to meet.
void pack_columns(const Matrix&, int64_t columns, int64_t inner, float* to);
void pack_rows(const Matrix&, int64_t rows, int64_t inner, float* to);

// sums = lines · panels, or `first` not: added to what is there. Their lines are written in whole panels.
void multiply(const Lines&, int64_t rows, const float* panels, int64_t inner, int64_t columns, float* sums, int64_t stride,
              bool first);

}  // namespace jaxfuse::attention
