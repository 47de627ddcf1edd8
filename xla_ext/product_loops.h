// The loops of product_kernels.h, for the ISA that the including file is compiled for.
#pragma once

#include "product_kernels.h"
#include "simd.h"

namespace jaxfuse::product {
namespace {

static_assert(kLanes == 8, "a block of eight by eight is transposed in registers");

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

// What all vectors have at eight places, from what eight vectors have.
inline void transpose(Floats (&v)[kLanes]) {
#ifdef __AVX2__
  __m256 pairs[kLanes], fours[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(v[i], v[i + 1]), pairs[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLanes; i += 4) {
#pragma GCC unroll 8
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    v[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < i; ++j) {
      const float other = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = other;
    }
  }
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
#pragma GCC unroll 8
      for (int64_t v = 0; v < kVectors; ++v) block[v] = load(from + (first + v) * step + k);
      transpose(block);
#pragma GCC unroll 8
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

// Unrolled by hand: the compiler would keep the sums in memory.
template <int64_t rows, bool packed, int64_t kVectors>
void outer_products(const Panels& panels, float* sums, int64_t stride, bool first) {
  const int64_t a_row = packed ? 1 : panels.a_row;
  Floats total[rows][kVectors];
#pragma GCC unroll 8
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
      for (int64_t j = 0; j < kVectors; ++j) v[j] = load(b + j * kLanes);
#pragma GCC unroll 8
      for (int64_t i = 0; i < rows; ++i) {
        const Floats factor = broadcast(a[i * a_row]);
#pragma GCC unroll 8
        for (int64_t j = 0; j < kVectors; ++j) total[i][j] = multiply_add(factor, v[j], total[i][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) {
      float* at = sums + i * stride + j * kLanes;
      store(at, first ? total[i][j] : load(at) + total[i][j]);
    }
  }
}

template <bool packed, int64_t vectors>
void outer_products(const Panels& panels, int64_t rows, float* sums, int64_t stride, bool first) {
  switch (rows) {
    case 1: return outer_products<1, packed, vectors>(panels, sums, stride, first);
    case 2: return outer_products<2, packed, vectors>(panels, sums, stride, first);
    case 3: return outer_products<3, packed, vectors>(panels, sums, stride, first);
    case 4: return outer_products<4, packed, vectors>(panels, sums, stride, first);
    case 5: return outer_products<5, packed, vectors>(panels, sums, stride, first);
    default: return outer_products<kRows, packed, vectors>(panels, sums, stride, first);
  }
}

template <bool packed>
void outer_products(const Panels& panels, int64_t rows, float* sums, int64_t stride, bool first) {
  constexpr int64_t kVectors = kColumns / kLanes;
  panels.half ? outer_products<packed, kVectors / 2>(panels, rows, sums, stride, first)
              : outer_products<packed, kVectors>(panels, rows, sums, stride, first);
}

constexpr Kernels kernels = {
    pack<kRows>,
    pack<kColumns>,
    [](const Panels& panels, int64_t rows, float* sums, int64_t stride, bool first) {
      panels.a_row == 1 ? outer_products<true>(panels, rows, sums, stride, first)
                        : outer_products<false>(panels, rows, sums, stride, first);
    },
};

}  // namespace
}  // namespace jaxfuse::product
