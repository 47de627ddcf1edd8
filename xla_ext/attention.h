// What both of attention's targets are asked for, checked, and how tiles of its matrices are multiplied.
#pragma once

#include <optional>

#include "attention_kernels.h"
#include "cut.h"
#include "handler.h"
#include "parallel.h"
#include "product.h"

namespace jaxfuse::attention {

using product::Matrix;

// Our loops for this machine.
const Kernels& kernels();

using product::kColumns, product::kMostRows, product::Lines, product::lines_of, product::multiply, product::pack_columns;

constexpr int64_t kBlockKeys = 256;  // which with their values lie in the second-level cache

// Columns whose panels are written whole.
inline int64_t whole_panels(int64_t columns) { return padded(columns, kColumns); }

// y = (softmax(scale·q·kᵀ + bias)·factor)·v for each of the batch: q is [rows, inner], k [keys, inner], v [keys, columns],
// y [rows, columns]; the factor, if there is one, is elementwise. Where the mask is 0 a score is `fill`.
struct Problem {
  Shape batch;
  int64_t rows, keys, inner, columns;
  float scale, fill;
  Matrix q, k, v;
  std::optional<Matrix> bias, mask, factor;

  // From the operands q, k, v, then bias, mask and factor where attributes say so. One size of the batch may be -1: what the
  // operands say.
  explicit Problem(const Call&);

  int64_t entries() const { return size_of(batch); }
  size_t operands() const { return 3 + bias.has_value() + mask.has_value() + factor.has_value(); }
  // The batch's size d, of which the tensor's attribute says that it has it; -1 where it does not.
  int64_t batch_size(const Call&, size_t d, const Tensor&, const char* strides, const Shape& extents) const;
  // The tensor's matrices, [extents...] each, laid as the attribute says.
  Matrix matrix(const Call&, const Tensor&, const char* strides, const Shape& extents) const;
  // The same, to be written: one matrix for each entry of the batch, the columns side by side.
  Matrix written(const Call&, const Tensor&, const char* strides, const Shape& extents) const;
  Scores scores(int64_t entry, int64_t row, int64_t rows, int64_t key, int64_t keys, float* s, int64_t stride) const;
};

// A forward call: y, and where they are wanted the largest score of each row and 1/Σe^(score - largest).
struct Forward {
  Problem problem;
  Tensor y;
  Matrix out;
  float *largest = nullptr, *inverse = nullptr;

  explicit Forward(const Call& call);

  // What the softmax has made of rows [row, row + rows) of an entry becomes theirs.
  void finish(const Softmax& state, int64_t entry, int64_t row, int64_t rows) const;
};

// Where AMX multiplies matrices of bf16: some rows of an entry.
bool takes_matrices(const Forward& f);
void attend_by_matrices(const Forward& f, int64_t entry, int64_t row, int64_t rows);

// f(task) for all tasks, on threads unless they are less work than waking these.
template <class F>
void for_tasks(const Problem& p, int64_t tasks, F f) {
  constexpr int64_t kFewProducts = 1 << 17;
  const bool few = p.entries() * p.rows * p.keys * (p.inner + p.columns) < kFewProducts;
  parallel_for(few ? 1 : tasks, [&](int64_t task) {
    for (int64_t i = few ? 0 : task, end = few ? tasks : task + 1; i < end; ++i) f(i);
  });
}

}  // namespace jaxfuse::attention
