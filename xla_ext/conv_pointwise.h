// A convolution by a filter of one spatial position, channels last, as the product of matrices that it is: [pixels, in]·[in, out], by our own
// loops, which widen bf16 while they pack it and round once. oneDNN's would be between two passes over whole tensors.
#pragma once

#include "conv.h"

namespace jaxfuse::conv::pointwise {

// Whether its products are ours: bf16 where oneDNN has no kernels of it.
bool takes(const Geometry& geometry, const Tensor& x, const Tensor& w);

void forward(const Forward& f);
void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);
void weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

}  // namespace jaxfuse::conv::pointwise
