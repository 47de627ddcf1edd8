// Products of matrices that lie anywhere in memory with one step from row to row and one from column to column.
#pragma once

#include "handler.h"

namespace jaxfuse::dense {

// Of a batch of matrices: the buffer, and the strides, in elements, of the batch axes, the rows and the columns.
struct Matrix {
  void* data;
  DType dtype;
  Shape strides;

  Matrix transposed() const;
  // Beginning at the i-th item of the axis.
  Matrix from(size_t axis, int64_t i) const;
};

// Row-major, without gaps.
Shape dense_strides(const Shape& shape);

// c = a·b for each of the batch: [m, k]·[k, n], in f32 unless a and b are bf16, whose sums are f32 too: only where
// conv::has_kernels(bf16). No size may be 0.
void matmul(const Shape& batch, int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Matrix& c);

}  // namespace jaxfuse::dense
