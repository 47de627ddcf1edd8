// The geometry of a convolution as both directions need it: read from the attributes and checked against the shapes, whatever
// order their dimensions are in; and a forward convolution as the target is asked for it.
#pragma once

#include "epilogue.h"

namespace jaxfuse::conv {

// Positions of the dimensions in a shape: (batch, feature, spatial...), for the filter (output feature, input feature,
// spatial...), as in jax.lax.ConvDimensionNumbers.
using Spec = Shape;

struct Geometry {
  // Throws unless the attributes are a convolution's of 1 to 3 spatial dimensions.
  explicit Geometry(const Call& call);

  // Refuses unless x (*) w = y fits.
  void check(const Call& call, const Tensor& x, const Tensor& w, const Tensor& y) const;

  // From one element of the filter to the next, along each of its dimensions in the order of rhs_spec.
  Shape filter_strides(const Tensor& w) const;

  // A convolution of x with zeros between its elements (`lhs_dilation`), with the filter spatially flipped: the gradient of a
  // strided convolution from y to x, its adjoint.
  bool transposed() const;
  bool strided() const;
  bool is_pointwise(const Tensor& w) const;  // each output reads the input at its own place; w is not empty
  Geometry adjoint(const Tensor& w) const;

  int64_t taps(const Tensor& w) const { return w.size() / w.shape[rhs_spec[0]] / w.shape[rhs_spec[1]]; }
  int64_t inputs_per_group(const Tensor& w) const { return filter_swapped ? w.shape[rhs_spec[0]] / groups : w.shape[rhs_spec[1]]; }

  size_t spatial_rank() const { return strides.size(); }

  Shape strides, padding_low, padding_high, dilation, lhs_dilation;
  int64_t groups;
  Spec lhs_spec, rhs_spec, out_spec;
  bool filter_swapped = false;  // within each group the filter's output features are the convolution's inputs
  int64_t filter_features = 0;  // input features of the filter's buffer, where w is a slice of it; 0: as many as w's
};

// x (*) w and what follows it.
struct Forward {
  Geometry geometry;
  Tensor x, w;
  Epilogue epilogue;
  bool adds = false;  // to what y holds

  const Tensor& y() const { return epilogue.y; }
};

// The forward convolution that a call asks for, checked: its operands are x, as many as there are of the filter, then those that
// `has_scale`, `has_bias` and `has_residual` name; its results are y and with `save_z` z.
Forward forward_of(const Call& call, const Tensor& w, size_t filters);

// The same of a call like the one that f is of: where its tensors lie, but for the filter.
void point_to(Forward& f, const Call& call, size_t filters);

// The values in the order of the spec.
Shape permuted(const Shape& values, const Spec& spec);

// From one element of x or y to the next along each of its dimensions, in the order of its spec.
Shape strides_of(const Tensor& t, const Spec& spec);

// Whether a tensor's dimensions lie in the order batch, spatial..., feature; a filter's: spatial..., input feature, output feature.
bool is_channels_last(const Spec& spec);
bool is_features_last(const Spec& spec);

}  // namespace jaxfuse::conv
