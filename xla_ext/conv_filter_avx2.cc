#include "conv_filter_kernels.h"
#include "simd.h"

namespace jaxfuse::conv::filter {

void outer_products(const Rows& rows, float* sums, int64_t stride, bool first) {
  constexpr int64_t kVectors = kOutputs / kLanes;
  Floats total[kInputs][kVectors];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kInputs; ++i) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) total[i][j] = Floats{};
    if (!first) __builtin_prefetch(sums + i * stride, 1);
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    const float *x = rows.x + rows.rows[r], *g = rows.g + r * rows.pixels * kOutputs;
    for (int64_t p = 0; p < rows.pixels; ++p, x += rows.step, g += kOutputs) {
      Floats v[kVectors];
#pragma GCC unroll 8
      for (int64_t j = 0; j < kVectors; ++j) v[j] = load(g + j * kLanes);
#pragma GCC unroll 8
      for (int64_t i = 0; i < kInputs; ++i) {
        const Floats xi = broadcast(x[i]);
#pragma GCC unroll 8
        for (int64_t j = 0; j < kVectors; ++j) total[i][j] = multiply_add(xi, v[j], total[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < kInputs; ++i) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) {
      float* at = sums + i * stride + j * kLanes;
      store_bits(at, first ? total[i][j] : load(at) + total[i][j]);
    }
  }
}

}  // namespace jaxfuse::conv::filter
