// 3×3 convolutions of stride 1 by Winograd's F(2×2): 16 products for the 36 of four outputs. In f32, channels last.
#pragma once

#include "conv.h"

namespace jaxfuse::conv::winograd {

constexpr int64_t kTransformedTaps = 16;

// Whether it is faster than oneDNN's, for these sizes.
bool takes(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

// All of f, by the transformed filter as contraction::pack leaves one of 16 taps, or if it is null by f.w. False where a result is not finite: what should be an infinity may be a NaN, for sums of it are subtracted.
bool forward(const Forward& f, const char* filter = nullptr);

// Whether the convolution is one of those.
bool fits(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

// The same for dx, the convolution of g by the spatially flipped filter.
bool takes_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);
bool data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);

// The gradient of such a convolution's filter (conv_winograd_filter.cc). It too is false where a result is not finite: dw is then
// not what it should be.
bool takes_filter_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);
bool filter_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g);

}  // namespace jaxfuse::conv::winograd
