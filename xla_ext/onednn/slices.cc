#include "slices.h"

#include <algorithm>

#include "layouts.h"
#include "onednn.h"

namespace jaxfuse::onednn {
namespace {

using conv::Geometry;

// Products in one sum, near XLA's error: with AVX-512 that is 3.8e-7, and 4.8e-7, four units of f32, is not passed; without,
// XLA's sums are longer. More slices are closer and slower, see "Long sums" in benchmarks/results/kernels.md.
int64_t longest_sum() { return has_avx512() ? 640 : 1200; }

// Pixels in one sum of a filter's gradient, so that it errs by some 5e-7; see the table in benchmarks/results/kernels.md.
constexpr int64_t kLongestGradientSum = 800, kManyFeatures = 16;

// As many as that of oneDNN's: its kernels of one tap add up a few pixels at a time, and with AVX-512 also those of many
// features, neither strided nor dilated.
int64_t longest_gradient_sum(const Geometry& geometry, const Tensor& dw) {
  const Shape ones(geometry.spatial_rank(), 1);
  const int64_t inputs = geometry.inputs_per_group(dw) * geometry.groups, filters = dw.size() / geometry.taps(dw);
  const bool many = inputs >= kManyFeatures && filters > geometry.groups;  // and not depthwise
  if (many && geometry.groups == 1 && geometry.taps(dw) == 1) return 80 * kLongestGradientSum;
  const bool dense = geometry.strides == ones && geometry.dilation == ones;
  return many && dense && has_avx512() ? 16 * kLongestGradientSum : kLongestGradientSum;
}

constexpr int64_t kFeatureStep = 16, kFewestFeatures = 32;  // whole vectors, and enough of them

bool is_channels_last(const dnnl::memory::desc& md) { return md == channels_last(md, ElementType::f32); }

}  // namespace

int64_t slice_count(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y) {
  const int64_t features = w.shape[geometry.rhs_spec[1]], longest = longest_sum();
  const int64_t products = w.size() / w.shape[geometry.rhs_spec[0]];
  if (x.dtype != DType::F32 || geometry.groups > 1 || geometry.transposed() || products <= longest) return 1;
  if (!is_channels_last(data(x, geometry.lhs_spec))) return 1;
  if (!is_channels_last(data(y, geometry.out_spec))) return 1;
  int64_t count = 1;
  for (int64_t n = 2; n * kFewestFeatures <= features && products / count > longest; ++n) {
    if (features % (n * kFeatureStep) == 0) count = n;
  }
  return count;
}

// oneDNN's fast kernels take dense tensors only, which a slice of the features of x is not. But x of width W with n·c
// features is, in memory, a dense tensor of width n·W with c features, and what a slice needs of that is every n-th pixel:
// a convolution with n times the stride, dilation and padding along the width, less i for slice i.
Slice::Slice(const Geometry& whole, const Tensor& whole_x, const Tensor& whole_w, const Tensor& y, int64_t i, int64_t n)
    : geometry(whole), x(whole_x), w(whole_w) {
  const size_t last = geometry.spatial_rank() - 1;
  int64_t& width = x.shape[geometry.lhs_spec[last + 2]];
  int64_t &stride = geometry.strides[last], &dilation = geometry.dilation[last];
  int64_t &low = geometry.padding_low[last], &high = geometry.padding_high[last];
  const int64_t features = w.shape[geometry.rhs_spec[1]] / n;
  geometry.filter_features = n * features;
  w.shape[geometry.rhs_spec[1]] = features;
  w.data = whole_w.as<float>() + i * features * geometry.filter_strides(whole_w)[1];
  x.shape[geometry.lhs_spec[1]] = features;
  width *= n, stride *= n, dilation *= n, low *= n;
  if (low > 0) {
    low -= i;
  } else {  // instead x begins at the slice; the pixels that now lie behind its end are none of the n-th
    x.data = whole_x.as<float>() + i * features;
  }
  const int64_t reach = (w.shape[geometry.rhs_spec[last + 2]] - 1) * dilation + 1;
  high = std::max<int64_t>(0, (y.shape[geometry.out_spec[last + 2]] - 1) * stride + reach - low - width);
}

int64_t images_per_sum(const Geometry& geometry, const Tensor& dw, const Tensor& g) {
  if (!is_loaded()) return 0;
  const int64_t batch = g.shape[geometry.out_spec[0]], pixels = g.size() / batch / g.shape[geometry.out_spec[1]];
  const int64_t fitting = longest_gradient_sum(geometry, dw) / pixels;
  if (g.dtype != DType::F32 || fitting >= batch) return batch;
  return geometry.lhs_spec[0] == 0 && geometry.out_spec[0] == 0 ? fitting : 0;
}

Tensor images(const Tensor& t, int64_t begin, int64_t count) {
  Tensor part = t;
  part.data = t.as<char>() + begin * (t.bytes() / t.shape[0]);
  part.shape[0] = count;
  return part;
}

}  // namespace jaxfuse::onednn
