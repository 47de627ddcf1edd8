// A dense layer as both directions need it: read from the attributes and checked against the buffers; and our own product with what
// follows it, which 1×1 convolutions have too.
#pragma once

#include "dense_matmul.h"
#include "epilogue.h"

namespace jaxfuse::dense {

// x·w for each of the batch by our own product, finished while it is in the cache.
void multiply(const Shape& batch, int64_t rows, int64_t inner, int64_t columns, const Matrix& x, const Matrix& w,
              const Epilogue& epilogue);

// batch × [rows, inner]·[inner, columns]; the output is row-major, without gaps.
struct Sizes {
  // One of batch and rows may be -1, which was not known when the program was exported: as many as `output` has.
  Sizes(const Call& call, const Tensor& output);

  Shape batch;
  int64_t rows, inner, columns;
  Shape x_strides, w_strides;

  Shape output() const;
  Matrix x(const Tensor& t) const { return {t.data, t.dtype, x_strides}; }
  Matrix w(const Tensor& t) const { return {t.data, t.dtype, w_strides}; }
  Matrix y(const Tensor& t) const { return {t.data, t.dtype, row_major_strides(output())}; }

  // Refuse unless the tensor has these elements.
  void check_x(const Call& call, const Tensor& t) const;
  void check_w(const Call& call, const Tensor& t) const;
  void check_y(const Call& call, const Tensor& t) const;
  void check_bias(const Call& call, const Tensor& t, std::initializer_list<DType> allowed) const;
};

}  // namespace jaxfuse::dense
