// A long f32 sum, cut up. oneDNN adds the products of an output, one after the other, to one f32 number, whose rounding
// error grows with the root of their count: 8e-7 for 3×3×256 of them. So a convolution with many is run as several, each
// over a slice of the input features, each but the first adding its sums to y.
#pragma once

#include "conv.h"

namespace jaxfuse::onednn {

// How many slices of input features x (*) w = y should be cut into; 1: none. All of them must be channels last, f32 and of one group.
int64_t slice_count(const conv::Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

// Part number i of n.
struct Slice {
  Slice(const conv::Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y, int64_t i, int64_t n);

  conv::Geometry geometry;
  Tensor x, w;
};

// Images [begin, begin + count) of t, whose batch is outermost.
Tensor images(const Tensor& t, int64_t begin, int64_t count);

}  // namespace jaxfuse::onednn
