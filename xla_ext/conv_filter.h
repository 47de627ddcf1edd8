// The gradient of a dense convolution's filter by our own loops.
#pragma once

#include "conv.h"

namespace jaxfuse::conv::filter {

// Whether it is an f32 convolution of one group with x and g channels last, none of them empty, of a kind for which the
// loops are faster than oneDNN.
bool takes(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

void gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

}  // namespace jaxfuse::conv::filter
