#include "epilogue.h"

#include <algorithm>

#include "bf16.h"
#include "cut.h"
#include "parallel.h"
#include "partial_sums.h"
#include "simd_level.h"

namespace jaxfuse::epilogue {
namespace {

constexpr int64_t kTaskElements = 1 << 14;

// f(begin, end) for all rows, on threads.
template <class F>
void for_rows(int64_t rows, int64_t columns, F f) {
  const int64_t step = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, columns));
  parallel_for(parts(rows, step), [&](int64_t task) { f(task * step, std::min(rows, (task + 1) * step)); });
}

// Rows of a part of Σ g. The cut depends on the shape alone, so sums repeat bit for bit on any number of threads. In f32 are sums of
// kLongestSum rows at most.
int64_t rows_of_part(const Rows& r) {
  constexpr int64_t kPartElements = 1 << 15, kMostParts = 256, kLongestSum = 256;
  const int64_t wanted = std::clamp<int64_t>(r.rows * r.columns / kPartElements, 1, std::min(kMostParts, r.rows));
  return parts(r.rows, r.row_features ? wanted : std::max(wanted, parts(r.rows, kLongestSum)));
}

}  // namespace

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

Rows::Rows(const Shape& shape, int64_t feature_position) : Rows(0, shape[feature_position]) {
  if (size_of(shape) == 0) return;
  const int64_t behind = size_of(Shape(shape.begin() + feature_position + 1, shape.end()));
  if (behind > 1) row_features = columns, columns = behind;
  rows = size_of(shape) / columns;
}

Tiles::Tiles(const Epilogue& epilogue, const Rows& rows) : rows_(rows) { point_to(epilogue); }

void Tiles::point_to(const Epilogue& epilogue) {
  epilogue_ = epilogue;
  if (narrow_bias()) bias_ = elements(epilogue.bias);
}

Tile Tiles::tile(const void* sums, DType dtype, int64_t stride, int64_t offset, int64_t column, int64_t columns) const {
  const Epilogue& e = epilogue_;
  const auto at = [&](const std::optional<Tensor>& t) { return t ? t->as<char>() + offset * ffi::ByteWidth(t->dtype) : nullptr; };
  return {element_of(e.y.dtype), columns, rows_.columns, rows_.row_features, e.activation, e.parameters, sums, stride,
          dtype == DType::F32, e.scale ? e.scale->as<float>() + column : nullptr, e.bias ? bias() + column : nullptr,
          at(e.residual), e.residual_last, at(e.z), at(e.y)};
}

#if defined(__x86_64__)
__attribute__((target("prfchw")))  // to be written to, at once; older processors take it for nothing
#endif
void fetch(const Tile& tile, int64_t rows) {
  constexpr int64_t kLine = 64;
  const int64_t size = tile.element == Element::f32 ? 4 : 2, bytes = tile.columns * size, step = tile.stride * size;
  const char *y = static_cast<const char*>(tile.y), *residual = static_cast<const char*>(tile.residual);
  for (int64_t at = 0, row = 0; row < rows; ++row, at += step) {
    for (int64_t i = 0; i < bytes; i += kLine) {
      __builtin_prefetch(y + at + i, 1);
      if (residual) __builtin_prefetch(residual + at + i);
    }
  }
}

void apply(const Tile& tile, int64_t rows) {
  for_rows(rows, tile.columns, [&](int64_t begin, int64_t end) { kernels().apply(tile, begin, end); });
}

void apply(const Epilogue& epilogue, int64_t feature_position, const void* sums, DType dtype) {
  const Rows r(epilogue.y.shape, feature_position);
  const Tiles tiles(epilogue, r);
  apply(tiles.tile(sums, dtype, r.columns, 0, 0, r.columns), r.rows);
}

void restore_not_finite(const Epilogue& epilogue, const void* z) {
  const Rows r(epilogue.y.size(), 1);
  const Tile tile = Tiles(epilogue, r).tile(z, epilogue.y.dtype, 1, 0, 0, 1);
  for_rows(r.rows, 1, [&](int64_t begin, int64_t end) { kernels().restore(tile, begin, end); });
}

void gradient(const Tensor& dy, const Rows& r, const Derivative& derivative, void* g, float* db) {
  if (r.rows == 0) return db ? (void)std::fill_n(db, r.features(), 0.0f) : void();
  const GradientTile tile{element_of(dy.dtype),  r.columns, r.row_features,   derivative.activation, derivative.parameters,
                          derivative.from_y, dy.data,   derivative.saved, g};
  const int64_t step = rows_of_part(r), count = parts(r.rows, step), part = r.row_features ? step : r.columns;
  std::vector<float> sums(db ? count * part : 0);
  parallel_for(count, [&](int64_t i) {
    kernels().gradient(tile, i * step, std::min(r.rows, (i + 1) * step), db ? &sums[i * part] : nullptr);
  });
  if (db) add_parts(sums.data(), r.row_features ? r.rows / r.row_features : count, r.features(), db);
}

}  // namespace jaxfuse::epilogue
