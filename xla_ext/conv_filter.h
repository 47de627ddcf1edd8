// The gradient of a convolution's filter by our own loops, whose sums are short whatever the shapes are.
#pragma once

#include "conv.h"

namespace jaxfuse::conv::filter {

// Whether they are faster than oneDNN's.
bool is_faster(const Geometry& geometry, const Tensor& dw);

// Of f32, of any layout and number of groups; none of the tensors may be empty.
void gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

}  // namespace jaxfuse::conv::filter
