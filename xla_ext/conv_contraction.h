// Convolutions of channels last by contraction.h: of any stride, padding, dilation, groups and rank, transposed ones, and gradients
// of x.
#pragma once

#include "conv.h"

namespace jaxfuse::conv::contracted {

// Whether the convolution is computed here: in a layout that the rows can have, and where that was measured to be the fastest way.
bool takes(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

// False, and y is to be computed again, where an infinity or a NaN of the filter met padding, over which a tap contributes nothing.
bool forward(const Forward& f);

// The same of dx from g.
bool takes_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);
bool data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);

}  // namespace jaxfuse::conv::contracted
