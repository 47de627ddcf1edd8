// The inner product of conv_filter.cc, compiled for one ISA.
#pragma once

#include <cstdint>

namespace jaxfuse::conv::filter {

constexpr int64_t kInputs = 6, kOutputs = 16;  // features of x and of g in a panel: their sums fill AVX2's registers

// Packed rows of `pixels` outputs. Row r of g begins at g + r·pixels·kOutputs; what one tap reads for it at x + rows[r], from
// pixel to pixel `step` further.
struct Rows {
  const float *x, *g;
  const int64_t* rows;
  int64_t count, pixels, step;
};

// sums[i·stride + j] = Σ x_i·g_j over the pixels, added to what is there unless `first`.
void outer_products(const Rows& rows, float* sums, int64_t stride, bool first);

}  // namespace jaxfuse::conv::filter
