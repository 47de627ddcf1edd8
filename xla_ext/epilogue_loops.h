// The loops of epilogue_kernels.h, for the ISA that the including file is compiled for.
#pragma once

#include "epilogue_tile.h"

namespace jaxfuse::epilogue {
namespace {

template <class T, class Lanes>
Floats sums_at(const Tile& tile, int64_t at, Lanes lanes) {
  if (!tile.sums) return Floats{};
  return tile.sums_f32 ? load(static_cast<const float*>(tile.sums) + at, lanes) : load(static_cast<const T*>(tile.sums) + at, lanes);
}

template <class T, Activation activation, bool by_row>
void apply(const Tile& given, int64_t begin, int64_t end) {
  const Tile tile = given;  // of our own: no store changes it, and nothing is read again
  for (int64_t row = begin; row < end; ++row) {
    const int64_t feature = by_row ? row % tile.row_features : 0;
    for_vectors(0, tile.columns, [&](int64_t c, auto lanes) {
      const Floats sum = sums_at<T>(tile, row * tile.sums_stride + c, lanes);
      finish<T, activation, by_row>(tile, sum, row * tile.stride + c, by_row ? feature : c, lanes);
    });
  }
}

constexpr int64_t kGroupRows = 8;  // that are taken together, vector of columns by vector

// What inference wants of sums in f32, without questions in the inner loop: 1 and -0 stand for no scale and no bias.
template <class T, Activation activation, bool has_residual>
void apply_to_groups(const Tile& given, int64_t begin, int64_t end) {
  const Tile tile = given;
  for (int64_t first = begin; first < end; first += kGroupRows) {
    const int64_t last = first + kGroupRows < end ? first + kGroupRows : end;
    for_vectors(0, tile.columns, [&](int64_t c, auto lanes) {
      const Floats scale = tile.scale ? load(tile.scale + c, lanes) : Floats{} + 1.0f;
      const Floats bias = tile.bias ? load(tile.bias + c, lanes) : Floats{} - 0.0f;
      for (int64_t row = first; row < last; ++row) {
        const int64_t at = row * tile.stride + c;
        Floats z = load(static_cast<const float*>(tile.sums) + row * tile.sums_stride + c, lanes) * scale + bias;
        if (has_residual) z += load(static_cast<const T*>(tile.residual) + at, lanes);
        store(static_cast<T*>(tile.y) + at, round_to<T>(activated<activation>(z, tile.parameters)), lanes);
      }
    });
  }
}

template <class T, Activation activation>
void restore(const Tile& tile, int64_t begin, int64_t end) {
  T* y = static_cast<T*>(tile.y);
  for_vectors(begin * tile.columns, end * tile.columns, [&](int64_t at, auto lanes) {
    const Floats z = sums_at<T>(tile, at, lanes), right = load(y + at, lanes);
    Floats restored = activated<activation>(z, tile.parameters);
    if (tile.residual) restored += load(static_cast<const T*>(tile.residual) + at, lanes);
    store(y + at, z - z == 0.0f ? right : round_to<T>(restored), lanes);
  });
}

template <class T, Activation activation, class Lanes>
Floats store_gradient(const GradientTile& tile, int64_t at, Lanes lanes) {
  const Floats g = gradient_at<T, activation>(tile, at, lanes);
  if (tile.g) store(static_cast<T*>(tile.g) + at, g, lanes);
  return g;
}

template <class T, Activation activation>
void gradient_of_columns(const GradientTile& given, int64_t begin, int64_t end, float* sums) {
  const GradientTile tile = given;
  for (int64_t c = 0; sums && c < tile.columns; ++c) sums[c] = 0;
  for (int64_t first = begin; first < end; first += kGroupRows) {
    const int64_t last = first + kGroupRows < end ? first + kGroupRows : end;
    for_vectors(0, tile.columns, [&](int64_t c, auto lanes) {
      Floats sum{};
      for (int64_t row = first; row < last; ++row) sum += store_gradient<T, activation>(tile, row * tile.columns + c, lanes);
      if (sums) store(sums + c, load(sums + c, lanes) + sum, lanes);
    });
  }
}

constexpr int64_t kLongestSum = 1024;  // of f32; sums of those are in double

template <class T, Activation activation>
void gradient_of_rows(const GradientTile& given, int64_t begin, int64_t end, float* sums) {
  const GradientTile tile = given;
  for (int64_t row = begin; row < end; ++row) {
    double total = 0;
    for (int64_t first = 0; first < tile.columns; first += kLongestSum) {
      const int64_t last = tile.columns - first < kLongestSum ? tile.columns : first + kLongestSum;
      Floats sum{};
      for_vectors(first, last, [&](int64_t c, auto lanes) {
        sum += store_gradient<T, activation>(tile, row * tile.columns + c, lanes);
      });
      for (int i = 0; i < kLanes; ++i) total += sum[i];
    }
    if (sums) sums[row - begin] = float(total);
  }
}

// f(value of the element's type, Constant<activation>)
template <class Tile, class F>
void with_types(const Tile& tile, F f) {
  with_element(tile.element, [&](auto t) { with_activation(tile.activation, [&](auto activation) { f(t, activation); }); });
}

constexpr Kernels kernels = {
    [](const Tile& tile, int64_t begin, int64_t end) {
      with_types(tile, [&](auto t, auto activation) {
        using T = decltype(t);
        if (tile.row_features) return apply<T, activation.value, true>(tile, begin, end);
        if (!tile.sums || !tile.sums_f32 || tile.z || tile.residual_last) return apply<T, activation.value, false>(tile, begin, end);
        tile.residual ? apply_to_groups<T, activation.value, true>(tile, begin, end)
                      : apply_to_groups<T, activation.value, false>(tile, begin, end);
      });
    },
    [](const Tile& tile, int64_t begin, int64_t end) {
      with_types(tile, [&](auto t, auto activation) { restore<decltype(t), activation.value>(tile, begin, end); });
    },
    [](const GradientTile& tile, int64_t begin, int64_t end, float* sums) {
      with_types(tile, [&](auto t, auto activation) {
        tile.row_features ? gradient_of_rows<decltype(t), activation.value>(tile, begin, end, sums)
                          : gradient_of_columns<decltype(t), activation.value>(tile, begin, end, sums);
      });
    },
};

}  // namespace
}  // namespace jaxfuse::epilogue
