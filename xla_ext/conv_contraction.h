// Convolutions of channels last by contraction.h: of any stride, padding, dilation, groups and rank, transposed ones, and gradients
// of x.
#pragma once

#include <memory>

#include "contraction.h"
#include "conv.h"

namespace jaxfuse::conv::contracted {

// From so many products on, with AVX2, oneDNN is slower (benchmarks/README.md).
constexpr int64_t kManyProducts = 150'000'000;

// Whether the layouts are those that rows and filters can have here.
bool fits(const Geometry& geometry, const Tensor& w);

// Whether the convolution is computed here: where that was measured to be the fastest way, or is the only one.
bool takes(const Forward& f);

// Over padding a tap contributes nothing, be it infinite or NaN. Such a filter is met again, without padding.
void forward(const Forward& f);

// The same by a filter that is packed, of a convolution that can have one; the filter is finite. The check refuses others.
void check_packed(const Call& call, const Geometry& geometry, const Tensor& w);

// x as u8, and what makes numbers of sums of its products with a filter of s8: f32(sum + offset of the feature), which the epilogue
// scales.
struct Int8 {
  float step;
  int32_t zero;            // the u8 that stands for 0
  const int32_t* offsets;  // -zero·Σ of the feature's filter
  bool narrow;             // the filter, as contraction_kernels.h has it
};

// Convolutions that differ in where their arrays lie. `int8`, which stays where it is: x is u8.
class Convolution;
class FlatImages;
class ByPanels {
 public:
  ByPanels();
  ~ByPanels();
  void run(const Forward& f, const char* panels, const Int8* int8 = nullptr);

 private:
  std::unique_ptr<Convolution> convolution_;  // or
  std::unique_ptr<FlatImages> flat_;
  int threads_ = 0;  // among which it is cut
};

// How the filter of such a convolution is packed, for rows of this dtype, and the filter itself.
contraction::Panels panels(const Geometry& geometry, const Tensor& w, DType dtype);
contraction::Filter filter(const Geometry& geometry, const Tensor& w);

// The same of dx from g.
bool takes_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);
void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g);

}  // namespace jaxfuse::conv::contracted
