// Convolutions of channels last by contraction.h: of any stride, padding, dilation, groups and rank, transposed ones, and gradients
// of x.
#pragma once

#include "contraction.h"
#include "conv.h"

namespace jaxfuse::conv::contracted {

// Whether the convolution is computed here: in a layout that the rows can have, and where that was measured to be the fastest way.
bool takes(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

// False, and y is to be computed again, where an infinity or a NaN of the filter met padding, over which a tap contributes nothing.
bool forward(const Forward& f);

// The same by a filter that is packed, of a convolution that can have one; the filter is finite.
bool takes_packed(const Geometry& geometry);
void forward(const Forward& f, const char* panels);

// How the filter of such a convolution is packed, for rows of this dtype, and the filter itself.
contraction::Panels panels(const Geometry& geometry, const Tensor& w, DType dtype);
contraction::Filter filter(const Geometry& geometry, const Tensor& w);

// The same of dx from g.
bool takes_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);
bool data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);

}  // namespace jaxfuse::conv::contracted
