// The geometry of a convolution as both directions need it: read from the attributes, checked against the shapes, and
// told to oneDNN as memory descriptors over the user's own buffers, whatever order their dimensions are in.
#pragma once

#include "handler.h"
#include "onednn.h"

namespace jaxfuse::conv {

// Positions of the dimensions in a shape: (batch, feature, spatial...), for the filter (output feature, input feature,
// spatial...), as in jax.lax.ConvDimensionNumbers.
using Spec = Shape;

struct Geometry {
  // Throws unless the attributes are a convolution's of 1 to 3 spatial dimensions.
  explicit Geometry(const Call& call);

  // Refuses unless x (*) w = y fits.
  void check(const Call& call, const Tensor& x, const Tensor& w, const Tensor& y) const;
  void append_to(onednn::Key& key) const;

  // The user's x or y: logical order (batch, feature, spatial...), strides of the user's buffer.
  dnnl::memory::desc data(const Tensor& t, const Spec& spec) const;
  // The user's filter: logical order ([group,] output feature, input feature, spatial...).
  dnnl::memory::desc filter(const Tensor& w) const;
  // From one element of that filter to the next, along each of its dimensions in the order of rhs_spec.
  Shape filter_strides(const Tensor& w) const;
  // One number per output feature, to be broadcast over y.
  dnnl::memory::desc per_feature(const Tensor& v, dnnl::memory::data_type type) const;

  // A convolution of x with zeros between its elements (`lhs_dilation`), with the filter turned around: the gradient of a
  // strided convolution from y to x, its adjoint.
  bool transposed() const;
  Geometry adjoint(const Tensor& w) const;

  int64_t taps(const Tensor& w) const { return w.size() / w.shape[rhs_spec[0]] / w.shape[rhs_spec[1]]; }
  int64_t inputs_per_group(const Tensor& w) const { return filter_swapped ? w.shape[rhs_spec[0]] / groups : w.shape[rhs_spec[1]]; }

  size_t spatial_rank() const { return strides.size(); }
  dnnl::memory::dims onednn_dilation() const;  // oneDNN counts the holes: 0 is dense

  Shape strides, padding_low, padding_high, dilation, lhs_dilation;
  int64_t groups;
  Spec lhs_spec, rhs_spec, out_spec;
  bool filter_swapped = false;  // within each group the filter's output features are the convolution's inputs
  int64_t filter_features = 0;  // input features of the filter's buffer, where w is a slice of it; 0: as many as w's
};

using ElementType = dnnl::memory::data_type;
ElementType element_type(DType dtype);

// Whether oneDNN has fast kernels of this dtype here. Of bf16 it has none before AVX-512, and its own casts to f32 take
// 100 ns an element there: see Wide in bf16.h.
bool has_kernels(DType dtype);

// Whether a tensor's dimensions lie in the order batch, spatial..., feature.
bool is_channels_last(const Spec& spec);

// The same dimensions in the layout that oneDNN chooses.
dnnl::memory::desc any_layout(const dnnl::memory::desc& md, ElementType type);

// The same dimensions, channels last: the layout that oneDNN's fastest kernels want of x and y. A buffer in another
// layout is reordered, which costs less than a kernel that reads it as it is.
dnnl::memory::desc channels_last(const dnnl::memory::desc& md, ElementType type);

dnnl::primitive_attr attributes();  // with scratch memory managed by us

void append_to(onednn::Key& key, const Tensor& t);

// y = x (*) w and nothing else; y may be f32 where x and w are not.
void convolve(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

}  // namespace jaxfuse::conv
