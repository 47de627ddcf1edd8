// A dense layer as both directions need it: read from the attributes and checked against the buffers.
#pragma once

#include <cstring>
#include <vector>

#include "activation.h"
#include "dense_kernels.h"
#include "dense_matmul.h"
#include "handler.h"

namespace jaxfuse::dense {

const Kernels& kernels();

// batch × [rows, inner]·[inner, columns]; the output is row-major, without gaps.
struct Sizes {
  explicit Sizes(const Call& call);

  Shape batch;
  int64_t rows, inner, columns;
  Shape x_strides, w_strides;

  Shape output() const;
  Matrix x(const Tensor& t) const { return {t.data, t.dtype, x_strides}; }
  Matrix w(const Tensor& t) const { return {t.data, t.dtype, w_strides}; }
  Matrix y(const Tensor& t) const { return {t.data, t.dtype, dense_strides(output())}; }

  // Refuse unless the tensor has these elements.
  void check_x(const Call& call, const Tensor& t) const;
  void check_w(const Call& call, const Tensor& t) const;
  void check_y(const Call& call, const Tensor& t) const;
  void check_bias(const Call& call, const Tensor& t, std::initializer_list<DType> allowed) const;
};

}  // namespace jaxfuse::dense
