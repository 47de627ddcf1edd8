// What follows a product or a convolution elementwise, and its gradient: tile by tile, or on whole tensors on threads.
#pragma once

#include <optional>
#include <vector>

#include "epilogue_kernels.h"
#include "handler.h"

namespace jaxfuse {

// z = scale·sums + bias + residual, y = activation(z); or the residual is added after the activation.
struct Epilogue {
  Tensor y;  // row-major, and so residual and z
  Activation activation = Activation::none;
  Parameters parameters{};
  std::optional<Tensor> scale{}, bias{}, residual{};  // scale (f32) and bias have one element for each feature
  bool residual_last = false;
  std::optional<Tensor> z{};  // saved for the gradient

  bool is_identity() const { return activation == Activation::none && !scale && !bias && !residual && !z; }
};

namespace epilogue {

const Kernels& kernels();

// A tensor seen as rows. Features are the columns if nothing lies behind them, else rows.
struct Rows {
  int64_t rows, columns, row_features;  // row_features as in Tile

  Rows(int64_t rows, int64_t columns) : rows(rows), columns(columns), row_features(0) {}
  Rows(const Shape& shape, int64_t feature_position);

  int64_t features() const { return row_features ? row_features : columns; }
};

// The epilogue for tiles of sums.
class Tiles {
 public:
  Tiles(const Epilogue& epilogue, const Rows& rows);

  // From now on those of another epilogue that differs in where its tensors lie.
  void point_to(const Epilogue& epilogue);

  // Sums of f32 or of y's dtype, `stride` from row to row, to become `columns` columns of rows of y. The first is element `offset`
  // of y, and in this column.
  Tile tile(const void* sums, DType dtype, int64_t stride, int64_t offset, int64_t column, int64_t columns) const;

  // In f32.
  const float* bias() const { return !epilogue_.bias ? nullptr : narrow_bias() ? bias_.data() : epilogue_.bias->as<float>(); }

 private:
  bool narrow_bias() const { return epilogue_.bias && epilogue_.bias->dtype != DType::F32; }

  Epilogue epilogue_;
  const Rows rows_;
  std::vector<float> bias_;  // of one that is not f32
};

// Has rows [0, rows) of a tile's y and residual fetched into the cache, for `apply` to find them there.
void fetch(const Tile& tile, int64_t rows);
// Of all rows of a tile, on threads.
void apply(const Tile& tile, int64_t rows);
// Of all of y, from sums that lie as it does (of f32 or y's dtype) or from zeros, where they are null.
void apply(const Epilogue& epilogue, int64_t feature_position, const void* sums, DType dtype);

// y = activation(z) + residual where z, which is like y, is not finite.
void restore_not_finite(const Epilogue& epilogue, const void* z);

// What the derivative of an activation is computed from.
struct Derivative {
  Activation activation;
  Parameters parameters;
  bool from_y;
  const void* saved;  // y if from_y, else z; not read for Activation::none
};

// g = dy·activation'(z), unless it is null; db, unless it is null, = Σ g of each feature, in f32.
void gradient(const Tensor& dy, const Rows& rows, const Derivative& derivative, void* g, float* db);

}  // namespace epilogue
}  // namespace jaxfuse
