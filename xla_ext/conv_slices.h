// A long f32 sum, cut up. oneDNN adds the products of an output, one after the other, to one f32 number, whose rounding
// error grows with the root of their count: 8e-7 for 3×3×256 of them. So a convolution with many is run as several, each
// over a slice of the input features, each but the first adding its sums to y.
#pragma once

#include "conv.h"

namespace jaxfuse::conv {

// How many slices of input features x (*) w = y should be cut into; 1: none. All of them must be channels last, f32 and of one group.
int64_t slice_count(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y);

// Part number i of n.
struct Slice {
  Slice(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y, int64_t i, int64_t n);

  Geometry geometry;
  Tensor x, w;
};

// How many images of the batch one sum of oneDNN's of the filter's gradient, over their pixels of g, may take in: all, some
// where x and g have the batch outermost, or 0 where even those of one are too many.
int64_t images_per_sum(const Geometry& geometry, const Tensor& dw, const Tensor& g);

// Images [begin, begin + count) of t, whose batch is outermost.
Tensor images(const Tensor& t, int64_t begin, int64_t count);

}  // namespace jaxfuse::conv
