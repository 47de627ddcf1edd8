// The tile that products of packed panels are made of: sums of a few rows by two vectors of columns, kept in registers. Include only
// from the loops of an ISA.
#pragma once

#include "product_kernels.h"
#include "simd.h"

namespace jaxfuse::product {
namespace {

// Sums of `rows` rows; of the last vector of columns only `lanes`. A line of b is in one piece, or `apart` in its panels. Unrolled by hand: the
// compiler would keep the sums in memory.
template <int64_t rows, bool packed, int64_t kVectors, bool apart, class Lanes>
void outer_products(const Panels& panels, float* sums, int64_t stride, bool first, Lanes lanes) {
  const int64_t a_row = packed ? 1 : panels.a_row;
  Floats total[rows][kVectors];
#pragma GCC unroll 16
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) total[i][j] = Floats{};
    if (!first) __builtin_prefetch(sums + i * stride, 1);
  }
  for (int64_t line = 0; line < panels.count; ++line) {
    const float *a = panels.a + panels.lines[line], *b = panels.b + line * panels.steps * panels.b_step;
    for (int64_t s = 0; s < panels.steps; ++s, a += panels.a_step, b += panels.b_step) {
      Floats v[kVectors];
#pragma GCC unroll 8
      for (int64_t j = 0; j < kVectors; ++j) {
        v[j] = load(b + (apart ? j * kLanes / kColumns * panels.b_panel + j * kLanes % kColumns : j * kLanes), lanes);
      }
#pragma GCC unroll 16
      for (int64_t i = 0; i < rows; ++i) {
        const Floats factor = broadcast(a[i * a_row]);
#pragma GCC unroll 8
        for (int64_t j = 0; j < kVectors; ++j) total[i][j] = multiply_add(factor, v[j], total[i][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) {
      float* at = sums + i * stride + j * kLanes;
      store(at, first ? total[i][j] : load(at, lanes) + total[i][j], lanes);
    }
  }
}

// The same of `count` rows, at most `rows`.
template <int64_t rows, bool packed, int64_t kVectors, bool apart = false, class Lanes>
void outer_products(const Panels& panels, int64_t count, float* sums, int64_t stride, bool first, Lanes lanes) {
  if constexpr (rows > 1) {
    if (count < rows) return outer_products<rows - 1, packed, kVectors, apart>(panels, count, sums, stride, first, lanes);
  }
  outer_products<rows, packed, kVectors, apart>(panels, sums, stride, first, lanes);
}

}  // namespace
}  // namespace jaxfuse::product
