// The user's buffers, and what oneDNN is to take in their place, as its memory descriptors.
#pragma once

#include "conv.h"
#include "primitive.h"

namespace jaxfuse::onednn {

using ElementType = dnnl::memory::data_type;
ElementType element_type(DType dtype);

// The user's x or y: logical order (batch, feature, spatial...), strides of the user's buffer.
dnnl::memory::desc data(const Tensor& t, const conv::Spec& spec);
// The user's filter: logical order ([group,] output feature, input feature, spatial...).
dnnl::memory::desc filter(const conv::Geometry& geometry, const Tensor& w);
// One element per output feature, to be broadcast over y.
dnnl::memory::desc per_feature(const conv::Geometry& geometry, const Tensor& v, ElementType type);

dnnl::memory::dims holes(const conv::Geometry& geometry);  // its dilation as oneDNN counts: 0 is dense

// The same dimensions in the layout that oneDNN chooses.
dnnl::memory::desc any_layout(const dnnl::memory::desc& md, ElementType type);

// The same dimensions, channels last: the layout that oneDNN's fastest kernels want of x and y. A buffer in another
// layout is reordered, which costs less than a kernel that reads it as it is.
dnnl::memory::desc channels_last(const dnnl::memory::desc& md, ElementType type);

dnnl::primitive_attr attributes();  // with scratch memory managed by us

void append_to(Key& key, const Tensor& t);
void append_to(Key& key, const conv::Geometry& geometry);

}  // namespace jaxfuse::onednn
