// The epilogue of one vector of sums, in registers. Include only from the loops of an ISA.
#pragma once

#include "activation_loops.h"
#include "epilogue_kernels.h"

namespace jaxfuse::epilogue {
namespace {

// Scale or bias of a vector: of its columns, or of its row for all lanes.
template <bool by_row, class Lanes>
Floats of_feature(const float* values, int64_t feature, Lanes lanes) {
  if constexpr (by_row) return Floats{} + values[feature];
  return load(values + feature, lanes);
}

// z and y at element `at`, whose first lane, or whose row, is of this feature.
template <class T, Activation activation, bool by_row, class Lanes>
void finish(const Tile& tile, Floats sum, int64_t at, int64_t feature, Lanes lanes) {
  Floats z = sum;
  if (tile.scale) z *= of_feature<by_row>(tile.scale, feature, lanes);
  if (tile.bias) z += of_feature<by_row>(tile.bias, feature, lanes);
  const Floats residual = tile.residual ? load(static_cast<const T*>(tile.residual) + at, lanes) : Floats{};
  if (tile.residual && !tile.residual_last) z += residual;
  if (tile.z) store(static_cast<T*>(tile.z) + at, round_to<T>(z), lanes);
  Floats y = activated<activation>(z, tile.parameters);
  if (tile.residual && tile.residual_last) y += residual;
  store(static_cast<T*>(tile.y) + at, round_to<T>(y), lanes);
}

// dy·activation' at element `at`.
template <class T, Activation activation, class Lanes>
Floats gradient_at(const GradientTile& tile, int64_t at, Lanes lanes) {
  const Floats dy = load(static_cast<const T*>(tile.dy) + at, lanes);
  if constexpr (activation == Activation::none) return dy;
  const Floats saved = load(static_cast<const T*>(tile.saved) + at, lanes);
  if constexpr (has_derivative_from_y(activation)) {
    if (tile.derivative_from_y) return round_to<T>(pulled_back_from_y<activation>(dy, saved, tile.parameters));
  }
  return round_to<T>(pulled_back<activation>(dy, saved, tile.parameters));
}

}  // namespace
}  // namespace jaxfuse::epilogue
