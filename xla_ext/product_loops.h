// The loops of product_kernels.h, for the ISA that the including file is compiled for.
#pragma once

#include "product_tile.h"
#include "simd_transpose.h"

namespace jaxfuse::product {
namespace {

constexpr int64_t kRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4, kTileColumns = kLanes == 16 ? 2 * kColumns : kColumns;
static_assert(kMostRows % kRows == 0 && (kRows <= kLanes || kRows % kLanes == 0));  // in panels, and in the blocks of a panel

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline float wide(f16 x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  return load(&x, First{1})[0];
#endif
}

// Elements [first, inner) of a panel of `count` vectors and zeros, wherever they lie.
template <int64_t size, class T>
void pack_elements(const T* from, int64_t step, int64_t inner_step, int64_t count, int64_t first, int64_t inner, float* to) {
  for (int64_t k = first; k < inner; ++k) {
    for (int64_t v = 0; v < size; ++v) to[k * size + v] = v < count ? wide(from[v * step + k * inner_step]) : 0.0f;
  }
}

// The same of vectors that are lines of memory.
template <int64_t size, class T>
void pack_lines(const T* from, int64_t step, int64_t count, int64_t inner, float* to) {
  constexpr int64_t kVectors = size < kLanes ? size : kLanes;  // in a block
  const int64_t blocks = count < size ? 0 : inner / kLanes * kLanes;
  for (int64_t k = 0; k < blocks; k += kLanes) {
    for (int64_t first = 0; first < size; first += kVectors) {
      Floats block[kLanes] = {};
#pragma GCC unroll 16
      for (int64_t v = 0; v < kVectors; ++v) block[v] = load(from + (first + v) * step + k);
      transpose(block);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) __builtin_memcpy(to + (k + i) * size + first, &block[i], kVectors * sizeof(float));
    }
  }
  pack_elements<size>(from, step, 1, count, blocks, inner, to);
}

// Panels of vectors that lie side by side.
template <int64_t size, class T>
void pack_beside(const T* from, int64_t inner_step, int64_t count, int64_t inner, float* to) {
  constexpr int64_t kRead = (size + kLanes - 1) / kLanes * kLanes;  // a line of a panel, in whole vectors
  const int64_t whole = count >= kRead ? (count - kRead) / size * size + size : 0;
  for (int64_t k = 0; k < inner; ++k) {
    for (int64_t v = 0; v + size <= whole; v += size) {
      const T* line = from + k * inner_step + v;
      float* place = to + v * inner + k * size;
      if constexpr (size == kRead) {
        for (int64_t i = 0; i < size; i += kLanes) store(place + i, load(line + i));
      } else {
        const Floats some = load(line);
        __builtin_memcpy(place, &some, size * sizeof(float));
      }
    }
  }
  for (int64_t v = whole; v < count; v += size) {
    pack_elements<size>(from + v, 1, inner_step, count - v, 0, inner, to + v * inner);
  }
}

template <int64_t size>
void pack(const Vectors& vectors, int64_t count, int64_t inner, float* to) {
  with_element(vectors.element, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(vectors.data);
    const int64_t step = vectors.step, inner_step = vectors.inner_step;
    if (step == 1) return pack_beside<size>(from, inner_step, count, inner, to);
    for (int64_t v = 0; v < count; v += size, from += size * step, to += size * inner) {
      inner_step == 1 ? pack_lines<size>(from, step, count - v, inner, to)
                      : pack_elements<size>(from, step, inner_step, count - v, 0, inner, to);
    }
  });
}

template <bool packed>
void outer_products(const Panels& panels, int64_t rows, float* sums, int64_t stride, bool first) {
  constexpr int64_t kVectors = kColumns / kLanes, kHalf = kColumns / 2;
  if (panels.columns > kColumns) return outer_products<kRows, packed, kTileColumns / kLanes, true>(panels, rows, sums, stride, first, Whole{});
  if (panels.columns > kHalf) return outer_products<kRows, packed, kVectors>(panels, rows, sums, stride, first, Whole{});
  if constexpr (kVectors > 1) {
    outer_products<kRows, packed, kVectors / 2>(panels, rows, sums, stride, first, Whole{});
  } else {
    outer_products<kRows, packed, 1>(panels, rows, sums, stride, first, First{kHalf});
  }
}

constexpr Kernels kernels = {
    kRows, kTileColumns,
    pack<kRows>,
    pack<kColumns>,
    [](const Panels& panels, int64_t rows, float* sums, int64_t stride, bool first) {
      panels.a_row == 1 ? outer_products<true>(panels, rows, sums, stride, first)
                        : outer_products<false>(panels, rows, sums, stride, first);
    },
};

}  // namespace
}  // namespace jaxfuse::product
