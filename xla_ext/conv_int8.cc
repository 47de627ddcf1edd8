// jaxfuse_conv_int8: jaxfuse_conv_fwd by a filter of s8 that is packed as bytes (contraction.h). x becomes bytes first, q = round(x/step)
// + zero; y = activation(scale·(Σ q·filter + offset) + bias + residual), where offset is -zero·Σ filter. The sums are exact. Elements of the filter are `most` at most, or
// those of one sign among any four that may be added in 16 bits (contraction_kernels.h) are so in the mean.
#include <cmath>

#include "conv_contraction.h"
#include "conv_pixels.h"
#include "scratch.h"

namespace jaxfuse::conv {
namespace {

constexpr int64_t kMostProducts = 1 << 16;  // of a sum: 255·127·2^16 is less than 2^31
constexpr int64_t kNarrow = 32;             // 255·4·32 is less than 2^15

class Int8Forward : public Kept::Object {
 public:
  explicit Int8Forward(const Call& call)
      : f_(forward_of(call, {"w", nullptr, call.operand(0, "x").dtype, call.int_array("filter_shape")}, 2)),
        int8_(checked(call)) {
    contracted::check_packed(call, f_.geometry, f_.w);
    if (f_.epilogue.z) call.refuse("save_z is true, expected false");
    const contraction::Panels panels = contracted::panels(f_.geometry, f_.w, DType::U8);
    const int64_t products = panels.taps * panels.inner;
    if (products > kMostProducts) call.refuse("sums of ", products, " products, expected at most ", kMostProducts);
    call.checked(call.operand(1, "packed"), DType::U8, {panels.all_bytes()});
    call.checked(call.operand(2, "offset"), DType::S32, {panels.columns});
    if (f_.y().size() > 0 && int8_.narrow && ByPixels::takes(of_bytes(nullptr), false)) pixels_.emplace(of_bytes(nullptr));
  }

  void run(const Call& call) {
    if (f_.y().size() == 0) return;
    point_to(f_, call, 2);
    int8_.offsets = static_cast<const int32_t*>(call.operand_data(2));
    const Scratch bytes(f_.x.size() + contraction::kStepBytes);  // the last step of the last pixel may be read whole
    contraction::quantise(f_.x, int8_.step, int8_.zero, bytes.as<uint8_t>());
    const char* const packed = static_cast<const char*>(call.operand_data(1));
    pixels_ ? pixels_->run(of_bytes(bytes.data()), packed, nullptr, &int8_) : direct_.run(of_bytes(bytes.data()), packed, &int8_);
  }

 private:
  static contracted::Int8 checked(const Call& call) {
    const float step = call.attr<float>("step");
    const int64_t zero = call.attr<int64_t>("zero"), most = call.attr<int64_t>("most");
    if (!(step > 0) || !std::isfinite(step)) call.refuse("step is ", step, ", expected a positive number");
    if (zero < 0 || zero > 255) call.refuse("zero is ", zero, ", expected 0 to 255");
    if (most < 1 || most > 127) call.refuse("most is ", most, ", expected 1 to 127");
    return {step, int32_t(zero), nullptr, most <= kNarrow};
  }

  Forward of_bytes(char* x) const {
    Forward f = f_;
    f.x = {f.x.name, x, DType::U8, f.x.shape};
    f.w.dtype = DType::U8;
    return f;
  }

  Forward f_;
  contracted::Int8 int8_;
  contracted::ByPanels direct_;
  std::optional<ByPixels> pixels_;
};

JAXFUSE_KEEPING_HANDLER(jaxfuse_conv_int8, Int8Forward);

}  // namespace
}  // namespace jaxfuse::conv
