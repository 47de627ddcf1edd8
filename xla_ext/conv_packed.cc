// jaxfuse_conv_pack: a filter as the products read it (contraction.h), for jaxfuse_conv_packed, which is jaxfuse_conv_fwd by such a
// filter. With `winograd` the latter has the transformed filter too, packed as one of 4×4 taps. The filter is finite.
// jaxfuse_conv_gated: the same of x times a factor of each channel of each image, an operand of shape (images, channels) behind the filter.
#include "conv_contraction.h"
#include "conv_pixels.h"
#include "conv_winograd.h"
#include "scratch.h"

namespace jaxfuse::conv {
namespace {

void check(const Call& call, const Tensor& packed, const contraction::Panels& panels) {
  call.checked(packed, DType::U8, {panels.all_bytes()});
}

void pack(const Call& call) {
  call.expect_counts(1, 1);
  const Geometry geometry(call);
  const Tensor w = call.operand(0, "w"), packed = call.result(0, "packed");
  call.expect_dtype(w, {DType::F32, DType::BF16});
  contracted::check_packed(call, geometry, w);
  const contraction::Panels panels = contracted::panels(geometry, w, w.dtype);
  check(call, packed, panels);
  contraction::pack(contracted::filter(geometry, w), panels, packed.as<char>());
}

// x's images, each channel times its factor, rounded to x's dtype.
void scale(const Tensor& x, const float* factors, char* to) {
  const int64_t images = x.shape[0], channels = x.shape.back(), pixels = x.size() / images / channels;
  for (int64_t i = 0; i < images; ++i, factors += channels) {
    const size_t offset = i * x.bytes() / images;
    const Tensor image{x.name, to + offset, x.dtype, {pixels, channels}}, scale{"factors", const_cast<float*>(factors), DType::F32, {channels}};
    epilogue::apply({image, Activation::none, {}, scale}, 1, x.as<char>() + offset, x.dtype);
  }
}

class PackedForward : public Kept::Object {
 public:
  explicit PackedForward(const Call& call, bool gated = false)
      : by_winograd_(call.attr<bool>("winograd")),
        gated_(gated),
        f_(forward_of(call, {"w", nullptr, call.operand(0, "x").dtype, call.int_array("filter_shape")}, 1 + by_winograd_ + gated)) {
    contracted::check_packed(call, f_.geometry, f_.w);
    check(call, call.operand(1, "packed"), contracted::panels(f_.geometry, f_.w, f_.x.dtype));
    if (gated_) call.checked(call.operand(2 + by_winograd_, "factors"), DType::F32, {f_.x.shape[0], f_.x.shape.back()});
    if (f_.y().size() == 0) return;
    if (ByPixels::takes(f_, gated_)) pixels_.emplace(f_);
    if (!by_winograd_) return;
    if (!winograd::fits(f_.geometry, f_.x, f_.w, f_.y())) call.refuse("the convolution is not one that Winograd's F(2×2, 3×3) takes");
    const int64_t features = f_.w.shape[f_.geometry.rhs_spec[0]];
    check(call, call.operand(2, "transformed"), {f_.x.shape[3], features, winograd::kTransformedTaps, f_.x.dtype});
  }

  void run(const Call& call) {
    if (f_.y().size() == 0) return;
    point_to(f_, call, 1 + by_winograd_ + gated_);
    const auto operand = [&](size_t i) { return static_cast<const char*>(call.operand_data(i)); };
    const float* const factors = gated_ ? static_cast<const float*>(call.operand_data(2 + by_winograd_)) : nullptr;
    if (pixels_ && (!gated_ || ByPixels::takes_factors(f_))) return pixels_->run(f_, operand(1), factors);
    const Scratch scaled(gated_ ? f_.x.bytes() + contraction::kStepBytes : 0);  // the last step of the last pixel may be read whole
    if (gated_) {
      scale(f_.x, factors, scaled.data());
      f_.x.data = scaled.data();
    }
    if (by_winograd_ && winograd::forward(f_, operand(2))) return;  // else infinities as they are
    pixels_ ? pixels_->run(f_, operand(1)) : direct_.run(f_, operand(1));
  }

 private:
  const bool by_winograd_, gated_;
  Forward f_;
  contracted::ByPanels direct_;
  std::optional<ByPixels> pixels_;
};

class GatedForward : public PackedForward {
 public:
  explicit GatedForward(const Call& call) : PackedForward(call, true) {}
};

JAXFUSE_HANDLER(jaxfuse_conv_pack, pack);
JAXFUSE_KEEPING_HANDLER(jaxfuse_conv_packed, PackedForward);
JAXFUSE_KEEPING_HANDLER(jaxfuse_conv_gated, GatedForward);

}  // namespace
}  // namespace jaxfuse::conv
