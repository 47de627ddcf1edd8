// jaxfuse_conv_pack: a filter as the products read it (contraction.h), for jaxfuse_conv_packed, which is jaxfuse_conv_fwd by such a
// filter. With `winograd` the latter has the transformed filter too, packed as one of 4×4 taps. The filter is finite.
#include "conv_contraction.h"
#include "conv_winograd.h"

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

void packed_fwd(const Call& call) {
  const bool by_winograd = call.attr<bool>("winograd");
  const Tensor w{"w", nullptr, call.operand(0, "x").dtype, call.int_array("filter_shape")};
  const Forward f = forward_of(call, w, 1 + by_winograd);
  contracted::check_packed(call, f.geometry, w);
  const Tensor direct = call.operand(1, "packed");
  check(call, direct, contracted::panels(f.geometry, f.w, f.x.dtype));
  if (f.y().size() == 0) return;
  if (by_winograd) {
    const Tensor transformed = call.operand(2, "transformed");
    if (!winograd::fits(f.geometry, f.x, f.w, f.y())) call.refuse("the convolution is not one that Winograd's F(2×2, 3×3) takes");
    check(call, transformed, {f.x.shape[3], f.w.shape[f.geometry.rhs_spec[0]], winograd::kTransformedTaps, f.x.dtype});
    if (winograd::forward(f, transformed.as<char>())) return;  // else infinities as they are
  }
  contracted::forward(f, direct.as<char>());
}

JAXFUSE_HANDLER(jaxfuse_conv_pack, pack);
JAXFUSE_HANDLER(jaxfuse_conv_packed, packed_fwd);

}  // namespace
}  // namespace jaxfuse::conv
