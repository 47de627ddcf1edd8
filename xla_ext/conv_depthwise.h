// Depthwise convolutions, one filter for each channel, by our own loops.
#pragma once

#include "conv.h"

namespace jaxfuse::conv::depthwise {

enum class Pass { forward, data, filter };

// Whether this is a depthwise convolution with x and y channels last, none of them empty, of a kind for which the loops
// are at least as fast as oneDNN in this pass.
bool takes(Pass pass, const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

void forward(const Forward& f);

// dx, from g = dy·activation'.
void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);

// dw and, unless it is null, db = Σ g. x and g are channels last, of as many channels as there are filters.
void weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g, float* db);

// dw of f32 where each filter has a single input, whatever the layout and however many filters read the same one.
bool has_single_inputs(const Geometry& geometry, const Tensor& w);
void weights_gradient_of_copies(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

}  // namespace jaxfuse::conv::depthwise
