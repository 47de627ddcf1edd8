// The gradient of a filter by contraction.h's tiles: dw[tap][c][n] = Σ over pixels of x[pixel under the tap][c]·g[pixel][n].
#pragma once

#include "conv.h"

namespace jaxfuse::conv::contracted {

// Whether it is computed here: channels last, one group, at most two spatial dimensions, and measured as the fastest way.
bool takes_filter_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

void filter_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

}  // namespace jaxfuse::conv::contracted
