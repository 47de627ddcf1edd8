// The loops of epilogue_kernels.h, for the ISA that the including file is compiled for.
#pragma once

#include "activation_loops.h"
#include "epilogue_kernels.h"

namespace jaxfuse::epilogue {
namespace {

template <class T, class Lanes>
Floats sums_at(const Tile& tile, int64_t at, Lanes lanes) {
  if (!tile.sums) return Floats{};
  return tile.sums_f32 ? load(static_cast<const float*>(tile.sums) + at, lanes) : load(static_cast<const T*>(tile.sums) + at, lanes);
}

// Scale or bias of a vector: of its columns, or of its row for all lanes.
template <bool by_row, class Lanes>
Floats of_feature(const float* values, int64_t feature, Lanes lanes) {
  if constexpr (by_row) return Floats{} + values[feature];
  return load(values + feature, lanes);
}

template <class T, bool by_row, class Act>
void apply(const Tile& given, Act act, int64_t begin, int64_t end) {
  const Tile tile = given;  // of our own: no store changes it, and nothing is read again
  const T* residual = static_cast<const T*>(tile.residual);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t feature = by_row ? row % tile.row_features : 0;
    for_groups<Act::kMost>(0, tile.columns, [&](int64_t first, int64_t n, auto lanes) {
      const auto z_at = [&](int64_t i) {
        const int64_t c = first + i * kLanes, at = row * tile.stride + c;
        Floats z = sums_at<T>(tile, row * tile.sums_stride + c, lanes);
        if (tile.scale) z *= of_feature<by_row>(tile.scale, by_row ? feature : c, lanes);
        if (tile.bias) z += of_feature<by_row>(tile.bias, by_row ? feature : c, lanes);
        if (residual && !tile.residual_last) z += load(residual + at, lanes);
        if (tile.z) store(static_cast<T*>(tile.z) + at, round_to<T>(z), lanes);
        return z;
      };
      act(n, z_at, [&](int64_t i, Floats y) {
        const int64_t at = row * tile.stride + first + i * kLanes;
        if (residual && tile.residual_last) y += load(residual + at, lanes);
        store(static_cast<T*>(tile.y) + at, round_to<T>(y), lanes);
      });
    });
  }
}

constexpr int64_t kGroupRows = 8;  // that are taken together, vector of columns by vector

// What inference wants of sums in f32, without questions in the inner loop: 1 and -0 stand for no scale and no bias.
template <class T, bool has_residual, class Act>
void apply_to_groups(const Tile& given, Act act, int64_t begin, int64_t end) {
  const Tile tile = given;
  for (int64_t first = begin; first < end; first += kGroupRows) {
    const int64_t rows = end - first < kGroupRows ? end - first : kGroupRows;
    for_vectors(0, tile.columns, [&](int64_t c, auto lanes) {
      const Floats scale = tile.scale ? load(tile.scale + c, lanes) : Floats{} + 1.0f;
      const Floats bias = tile.bias ? load(tile.bias + c, lanes) : Floats{} - 0.0f;
      const auto z_at = [&](int64_t i) {
        const int64_t row = first + i;
        const Floats z = load(static_cast<const float*>(tile.sums) + row * tile.sums_stride + c, lanes) * scale + bias;
        if constexpr (!has_residual) return z;
        return z + load(static_cast<const T*>(tile.residual) + row * tile.stride + c, lanes);
      };
      act(rows, z_at, [&](int64_t i, Floats y) { store(static_cast<T*>(tile.y) + (first + i) * tile.stride + c, round_to<T>(y), lanes); });
    });
  }
}

template <class T>
void restore(const Tile& tile, int64_t begin, int64_t end) {
  T* y = static_cast<T*>(tile.y);
  for_groups<Called::kMost>(begin * tile.columns, end * tile.columns, [&](int64_t first, int64_t n, auto lanes) {
    const auto z_at = [&](int64_t i) { return sums_at<T>(tile, first + i * kLanes, lanes); };
    Called{activate_by(tile.activation), tile.parameters}(n, z_at, [&](int64_t i, Floats restored) {
      const int64_t at = first + i * kLanes;
      const Floats z = z_at(i), right = load(y + at, lanes);
      if (tile.residual) restored += load(static_cast<const T*>(tile.residual) + at, lanes);
      store(y + at, z - z == 0.0f ? right : round_to<T>(restored), lanes);
    });
  });
}

// put(i, dy·activation') for `n` vectors, `step` apart from element `at` on; it is stored in g where that is wanted.
template <class T, class Act, class Lanes, class Put>
void for_gradients(const GradientTile& tile, Act act, int64_t at, int64_t step, int64_t n, Lanes lanes, Put put) {
  const auto load_from = [&](const void* from) { return [=](int64_t i) { return load(static_cast<const T*>(from) + at + i * step, lanes); }; };
  act(n, load_from(tile.dy), load_from(tile.saved), [&](int64_t i, Floats gradient) {
    const Floats g = Act::kIsIdentity ? gradient : round_to<T>(gradient);
    if (tile.g) store(static_cast<T*>(tile.g) + at + i * step, g, lanes);
    put(i, g);
  });
}

template <class T, class Act>
void gradient_of_columns(const GradientTile& given, Act act, int64_t begin, int64_t end, float* sums) {
  const GradientTile tile = given;
  for (int64_t c = 0; sums && c < tile.columns; ++c) sums[c] = 0;
  for (int64_t first = begin; first < end; first += kGroupRows) {
    const int64_t rows = end - first < kGroupRows ? end - first : kGroupRows;
    for_vectors(0, tile.columns, [&](int64_t c, auto lanes) {
      Floats sum{};
      for_gradients<T>(tile, act, first * tile.columns + c, tile.columns, rows, lanes, [&](int64_t, Floats g) { sum += g; });
      if (sums) store(sums + c, load(sums + c, lanes) + sum, lanes);
    });
  }
}

constexpr int64_t kLongestSum = 256;  // of f32; sums of those are in double

template <class T, class Act>
void gradient_of_rows(const GradientTile& given, Act act, int64_t begin, int64_t end, float* sums) {
  const GradientTile tile = given;
  for (int64_t row = begin; row < end; ++row) {
    double total = 0;
    for (int64_t first = 0; first < tile.columns; first += kLongestSum) {
      const int64_t last = tile.columns - first < kLongestSum ? tile.columns : first + kLongestSum;
      Floats sum{};
      for_groups<Act::kMost>(first, last, [&](int64_t c, int64_t n, auto lanes) {
        for_gradients<T>(tile, act, row * tile.columns + c, kLanes, n, lanes, [&](int64_t, Floats g) { sum += g; });
      });
      for (int i = 0; i < kLanes; ++i) total += sum[i];
    }
    if (sums) sums[row - begin] = float(total);
  }
}

constexpr Kernels kernels = {
    [](const Tile& tile, int64_t begin, int64_t end) {
      with_element(tile.element, [&](auto t) {
        using T = decltype(t);
        with_activation(tile.activation, tile.parameters, [&](auto act) {
          if (tile.row_features) return apply<T, true>(tile, act, begin, end);
          if (!tile.sums || !tile.sums_f32 || tile.z || tile.residual_last) return apply<T, false>(tile, act, begin, end);
          tile.residual ? apply_to_groups<T, true>(tile, act, begin, end) : apply_to_groups<T, false>(tile, act, begin, end);
        });
      });
    },
    [](Activation activation, const Parameters& parameters, float* z, int64_t count) { activate_by(activation)(z, count, parameters); },
    [](const Tile& tile, int64_t begin, int64_t end) {
      with_element(tile.element, [&](auto t) { restore<decltype(t)>(tile, begin, end); });
    },
    [](const GradientTile& tile, int64_t begin, int64_t end, float* sums) {
      with_element(tile.element, [&](auto t) {
        using T = decltype(t);
        with_gradient(tile.activation, tile.derivative_from_y, tile.parameters, [&](auto act) {
          tile.row_features ? gradient_of_rows<T>(tile, act, begin, end, sums) : gradient_of_columns<T>(tile, act, begin, end, sums);
        });
      });
    },
};

}  // namespace
}  // namespace jaxfuse::epilogue
