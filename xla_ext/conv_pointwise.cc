#include "conv_pointwise.h"

#include "dense.h"
#include "onednn/onednn.h"

namespace jaxfuse::conv::pointwise {
namespace {

using dense::Matrix;

// x, y or a gradient of theirs, a pixel to a row.
Matrix pixels(const Tensor& t, int64_t features) { return {t.data, t.dtype, {features, 1}}; }

// The filter from input to output features.
Matrix filter(const Geometry& geometry, const Tensor& w) {
  const Shape strides = geometry.filter_strides(w);
  return {w.data, w.dtype, {strides[1], strides[0]}};
}

struct Sizes {
  int64_t pixels, inputs, outputs;

  Sizes(const Geometry& geometry, const Tensor& x, const Tensor& w)
      : pixels(x.size() / x.shape[geometry.lhs_spec[1]]), inputs(w.shape[geometry.rhs_spec[1]]), outputs(w.shape[geometry.rhs_spec[0]]) {}
};

}  // namespace

bool takes(const Geometry& g, const Tensor& x, const Tensor& w) {
  return !onednn::has_kernels(x.dtype) && x.size() > 0 && w.size() > 0 && g.groups == 1 && g.is_pointwise(w) &&
         is_channels_last(g.lhs_spec) && is_channels_last(g.out_spec);
}

void forward(const Forward& f) {
  const Sizes s(f.geometry, f.x, f.w);
  dense::multiply({}, s.pixels, s.inputs, s.outputs, pixels(f.x, s.inputs), filter(f.geometry, f.w), f.epilogue);
}

void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  const Sizes s(geometry, dx, w);
  dense::matmul({}, s.pixels, s.outputs, s.inputs, pixels(g, s.outputs), filter(geometry, w).transposed(), pixels(dx, s.inputs));
}

void weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const Sizes s(geometry, x, dw);
  dense::matmul({}, s.inputs, s.pixels, s.outputs, pixels(x, s.inputs).transposed(), pixels(g, s.outputs), filter(geometry, dw));
}

}  // namespace jaxfuse::conv::pointwise
