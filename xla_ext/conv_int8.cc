// jaxfuse_conv_int8: jaxfuse_conv_fwd by a filter of s8 that is packed as bytes (contraction.h). x becomes bytes first, q = round(x/step)
// + zero; y = activation(scale·(Σ q·filter + offset) + bias + residual), where offset is -zero·Σ filter. The sums are exact.
#include <cmath>

#include "conv_contraction.h"

namespace jaxfuse::conv {
namespace {

constexpr int64_t kMostProducts = 1 << 16;  // of a sum: 255·127·2^16 is less than 2^31
constexpr int64_t kSmall = 64;              // two products of it and of u8 fit into s16

void int8_fwd(const Call& call) {
  const Tensor w{"w", nullptr, call.operand(0, "x").dtype, call.int_array("filter_shape")};
  const Forward f = forward_of(call, w, 2);
  contracted::check_packed(call, f.geometry, w);
  if (f.epilogue.z) call.refuse("save_z is true, expected false");
  const contraction::Panels panels = contracted::panels(f.geometry, w, DType::U8);
  const int64_t products = panels.taps * panels.inner, zero = call.attr<int64_t>("zero"), most = call.attr<int64_t>("most");
  if (products > kMostProducts) call.refuse("sums of ", products, " products, expected at most ", kMostProducts);
  const Tensor packed = call.checked(call.operand(1, "packed"), DType::U8, {panels.all_bytes()});
  const Tensor offset = call.checked(call.operand(2, "offset"), DType::S32, {panels.columns});
  const float step = call.attr<float>("step");
  if (!(step > 0) || !std::isfinite(step)) call.refuse("step is ", step, ", expected a positive number");
  if (zero < 0 || zero > 255) call.refuse("zero is ", zero, ", expected 0 to 255");
  if (most < 1 || most > 127) call.refuse("most is ", most, ", expected 1 to 127");
  if (f.y().size() == 0) return;
  contracted::forward(f, packed.as<char>(), {step, int32_t(zero), offset.as<int32_t>(), most <= kSmall});
}

JAXFUSE_HANDLER(jaxfuse_conv_int8, int8_fwd);

}  // namespace
}  // namespace jaxfuse::conv
