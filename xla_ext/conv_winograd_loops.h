// The loops of conv_winograd_kernels.h, for the ISA that the including conv_winograd_<isa>.cc file is compiled for. F(2×2, 3×3) of
// Lavin and Gray, "Fast algorithms for convolutional neural networks" (2015):
//   y = Aᵀ·[(G·g·Gᵀ) ⊙ (Bᵀ·d·B)]·A
//        1  0  0               1  0 -1  0          1  1  1  0
//   G =  ½  ½  ½         Bᵀ =  0  1  1  0    Aᵀ =  0  1 -1 -1
//        ½ -½  ½               0 -1  1  0
//        0  0  1               0  1  0 -1
#pragma once

#include "conv_winograd_kernels.h"
#include "product_tile.h"
#include "simd.h"

namespace jaxfuse::conv::winograd {
namespace {

// ---- G·g·Gᵀ

struct Three {
  Floats at[3];
};
struct Four {
  Floats at[kSide];
};

inline Four filter_line(const Three& g) {
  const Floats outer = 0.5f * (g.at[0] + g.at[2]), inner = 0.5f * g.at[1];
  return {g.at[0], outer + inner, outer - inner, g.at[2]};
}

inline Floats load_features(const float* w, int64_t step, int64_t count) {
  if (step == 1 && count >= kLanes) return load(w);
  float values[kLanes] = {};
  for (int64_t k = 0; k < kLanes && k < count; ++k) values[k] = w[k * step];
  return load(values);
}

void transform_filter(const Filter& f, int64_t channels, int64_t count, float* to, int64_t columns, int64_t point) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t k = 0; k < columns; k += kLanes) {
      const float* w = f.w + c * f.channel + k * f.feature;
      Four lines[3];
      for (int64_t i = 0; i < 3; ++i) {
        Three g;
        for (int64_t j = 0; j < 3; ++j) g.at[j] = load_features(w + i * f.line + j * f.column, f.feature, count - k);
        lines[i] = filter_line(g);
      }
      float* at = to + c * columns + k;
      for (int64_t j = 0; j < kSide; ++j) {
        const Four u = filter_line({lines[0].at[j], lines[1].at[j], lines[2].at[j]});
        for (int64_t i = 0; i < kSide; ++i) store(at + (i * kSide + j) * point, u.at[i]);
      }
    }
  }
}

// ---- Bᵀ·d·B, a line at a time

// A line of Bᵀ is one line of pixels and another by a sign.
struct Pair {
  int64_t first, second;
  float sign;
};
constexpr Pair kInputLines[kSide] = {{0, 2, -1}, {1, 2, 1}, {2, 1, -1}, {1, 3, -1}};

inline Four input_line(Floats d0, Floats d1, Floats d2, Floats d3) { return {d0 - d2, d1 + d2, d2 - d1, d1 - d3}; }

void transform_input(const float* const* pixels, int64_t line, int64_t channels, float* to, int64_t point) {
  const Pair pair = kInputLines[line];
  const float* const *first = pixels + pair.first * kSide, *const *second = pixels + pair.second * kSide;
  for_vectors(0, channels, [&](int64_t c, auto lanes) {
    Floats d[kSide];
#pragma GCC unroll 4
    for (int64_t j = 0; j < kSide; ++j) d[j] = load(first[j] + c, lanes) + pair.sign * load(second[j] + c, lanes);
    const Four v = input_line(d[0], d[1], d[2], d[3]);
#pragma GCC unroll 4
    for (int64_t j = 0; j < kSide; ++j) store(to + j * point + c, v.at[j]);
  });
}

// ---- Aᵀ·m·A, a line at a time

// A sum that is finite if all of its terms are, but for terms near the end of f32's range.
template <int64_t line>
Floats add_tile(const float* m, int64_t point, float* const z[2], int64_t row) {
  const Floats m1 = load(m + point), m2 = load(m + 2 * point);
  const Floats outputs[2] = {load(m) + (m1 + m2), (m1 - m2) - load(m + 3 * point)};
  Floats sum{};
#pragma GCC unroll 2
  for (int64_t j = 0; j < 2; ++j) {
    float *const upper = z[0] + j * row, *const lower = z[1] + j * row;
    const auto put = [&](float* to, Floats value) { sum += value, store(to, value); };
    if constexpr (line == 0) put(upper, outputs[j]);
    if constexpr (line == 1 || line == 2) put(upper, load(upper) + outputs[j]);
    if constexpr (line == 1) put(lower, outputs[j]);
    if constexpr (line == 2 || line == 3) put(lower, load(lower) - outputs[j]);
  }
  return sum;
}

template <int64_t line>
bool add_tiles(const Outputs& out) {
  Floats sum{};
  for (int64_t tile = 0; tile < out.tiles; ++tile) {
    for (int64_t k = 0; k < out.columns; k += kLanes) {
      float* const z[2] = {out.z[0] + 2 * tile * out.row + k, out.z[1] + 2 * tile * out.row + k};
      sum += add_tile<line>(out.m + tile * out.row + k, out.point, z, out.row);
    }
  }
  return to_bits(sum - sum == 0.0f) == (1u << kLanes) - 1;
}

bool add_outputs(const Outputs& out, int64_t line) {
  return line == 0 ? add_tiles<0>(out) : line == 1 ? add_tiles<1>(out) : line == 2 ? add_tiles<2>(out) : add_tiles<3>(out);
}

// ---- Gᵀ·[Σ (Bᵀ·d·B) ⊙ (A·g·Aᵀ)]·G, the gradient of a filter from that of y, a line at a time

constexpr float kA[kSide][2] = {{1, 0}, {1, 1}, {1, -1}, {0, -1}}, kG[kSide][3] = {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}};

void transform_gradient(const float* const* pixels, int64_t line, int64_t channels, float* to, int64_t point) {
  const float first = kA[line][0], second = kA[line][1];
  for_vectors(0, channels, [&](int64_t c, auto lanes) {
    const Floats left = first * load(pixels[0] + c, lanes) + second * load(pixels[2] + c, lanes),
                 right = first * load(pixels[1] + c, lanes) + second * load(pixels[3] + c, lanes);
    const Floats v[kSide] = {left, left + right, left - right, -right};
#pragma GCC unroll 4
    for (int64_t j = 0; j < kSide; ++j) store(to + j * point + c, v[j]);
  });
}

constexpr int64_t kRows = kLanes == 4 ? 4 : 6, kVectors = kLanes == 16 ? 4 : 2;

template <int64_t vectors = kVectors>
void multiply(const product::Panels& panels, int64_t rows, int64_t columns, float* sums, int64_t stride, bool first) {
  if constexpr (vectors > 1) {
    if (columns <= (vectors - 1) * kLanes) return multiply<vectors - 1>(panels, rows, columns, sums, stride, first);
  }
  product::outer_products<kRows, true, vectors>(panels, rows, sums, stride, first, Whole{});
}

bool add_taps(const float* m, int64_t point, int64_t line, int64_t count, float* taps, int64_t tap) {
  Floats sum{};
  for_vectors(0, count, [&](int64_t k, auto lanes) {
    Floats l[3] = {};
#pragma GCC unroll 4
    for (int64_t j = 0; j < kSide; ++j) {
      const Floats value = load(m + j * point + k, lanes);
#pragma GCC unroll 3
      for (int64_t i = 0; i < 3; ++i) l[i] += kG[j][i] * value;
    }
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t j = 0; j < 3; ++j) {
        float* const at = taps + (i * 3 + j) * tap + k;
        const Floats value = load(at, lanes) + kG[line][i] * l[j];
        store(at, value, lanes);
        sum += value * 0.0f;
      }
    }
  });
  return to_bits(sum == 0.0f) == (1u << kLanes) - 1;
}

constexpr Kernels kernels = {
    transform_filter, transform_input, add_outputs, {kRows, kVectors * kLanes, transform_gradient, multiply<>, add_taps},
};

}  // namespace
}  // namespace jaxfuse::conv::winograd
