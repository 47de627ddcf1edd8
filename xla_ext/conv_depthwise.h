// Depthwise convolutions, one filter for each channel, by our own loops.
#pragma once

#include "conv.h"

namespace jaxfuse::conv::depthwise {

// Whether this is a depthwise convolution with x and y channels last, none of them empty, of a kind for which the loops
// are at least as fast as oneDNN; so of its gradients.
bool takes(const Forward& f);
bool takes_data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& dy);
bool takes_weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& dy);

void forward(const Forward& f);

// dx, from g = dy·activation'.
void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);

// dw and, unless it is null, db = Σ g. x and g are channels last, of as many channels as there are filters.
void weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g, float* db);

// dw of f32 where each filter has a single input, whatever the layout and however many filters read the same one.
bool has_single_inputs(const Geometry& geometry, const Tensor& w);
void weights_gradient_of_copies(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

}  // namespace jaxfuse::conv::depthwise
