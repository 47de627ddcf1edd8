#include "conv_epilogue.h"

#include <algorithm>

#include "parallel.h"
#include "simd_level.h"

namespace jaxfuse::conv {
namespace {

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

constexpr int64_t kChunkElements = 1 << 15, kMostChunks = 256, kLongestSum = 1024;

// A tensor as (outer, features, inner), cut into chunks of whole rows. The cut depends on the shape alone, so sums per
// chunk repeat bit for bit on any number of threads; those of f32 are of kLongestSum pixels at most.
struct Chunks {
  int64_t features, inner = 1, rows = 0, step = 0, count = 0;

  Chunks(const Shape& shape, int64_t feature_position) {
    features = shape[feature_position];
    if (size_of(shape) == 0) return;
    inner = size_of(Shape(shape.begin() + feature_position + 1, shape.end()));
    rows = size_of(shape) / inner;  // elements, if inner == 1
    const int64_t unit = inner == 1 ? features : 1, units = rows / unit;
    const int64_t even = std::clamp<int64_t>(size_of(shape) / kChunkElements, 1, std::min(kMostChunks, units));
    const int64_t wanted = inner == 1 ? std::max(even, (units + kLongestSum - 1) / kLongestSum) : even;
    step = (units + wanted - 1) / wanted * unit;
    count = (rows + step - 1) / step;
  }

  int64_t begin(int64_t chunk) const { return chunk * step; }
  int64_t end(int64_t chunk) const { return std::min(rows, (chunk + 1) * step); }
};

EpilogueArgs arguments(const Tensor& y, const Chunks& chunks, const Epilogue& e) {
  return {y.dtype == DType::BF16, chunks.features, chunks.inner, e.activation, e.parameters, e.in, e.in_dtype == DType::F32,
          e.scale, e.bias, e.residual, e.residual_last, y.data};
}

}  // namespace

void run_epilogue(const Tensor& y, int64_t feature_position, const Epilogue& e) {
  const Chunks chunks(y.shape, feature_position);
  const EpilogueArgs args = arguments(y, chunks, e);
  auto* loop = kernels().epilogue;
  parallel_for(chunks.count, [&](int64_t chunk) { loop(args, chunks.begin(chunk), chunks.end(chunk)); });
}

void restore_not_finite(const Tensor& y, int64_t feature_position, const void* z, Activation activation, const Parameters& parameters,
                        const void* added) {
  const Chunks chunks(y.shape, feature_position);
  const EpilogueArgs args = arguments(y, chunks, {activation, parameters, z, y.dtype, nullptr, nullptr, added, true});
  auto* loop = kernels().restore;
  parallel_for(chunks.count, [&](int64_t chunk) { loop(args, chunks.begin(chunk), chunks.end(chunk)); });
}

void run_gradient(const Tensor& dy, int64_t feature_position, const Gradient& gradient, float* db) {
  const Chunks chunks(dy.shape, feature_position);
  const GradientArgs args{dy.dtype == DType::BF16, chunks.features, chunks.inner, gradient.activation, gradient.parameters,
                          dy.data, gradient.told, gradient.by_value, gradient.g};
  const int64_t per_chunk = chunks.inner == 1 ? chunks.features : chunks.step;
  std::vector<float> sums(db ? chunks.count * per_chunk : 0);
  auto* loop = kernels().gradient;
  parallel_for(chunks.count, [&](int64_t chunk) {
    loop(args, chunks.begin(chunk), chunks.end(chunk), db ? sums.data() + chunk * per_chunk : nullptr);
  });
  if (!db) return;
  std::vector<double> totals(chunks.features);
  const int64_t n = chunks.inner == 1 ? chunks.count * chunks.features : chunks.rows;
  for (int64_t i = 0; i < n; ++i) totals[i % chunks.features] += sums[i];
  std::copy(totals.begin(), totals.end(), db);
}

}  // namespace jaxfuse::conv
