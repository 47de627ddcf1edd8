// jaxfuse_conv_fwd: y = activation(z), z = scale·conv(x, w) + bias + residual, in one pass over y; or the residual is added
// after the activation. With `save_z` z is a second result. y, and with it the residual and z, may be f32 where x is bf16.
#include <optional>

#include "activation_attr.h"
#include "bf16.h"
#include "conv.h"
#include "conv_contraction.h"
#include "conv_depthwise.h"
#include "conv_epilogue.h"
#include "conv_pointwise.h"
#include "conv_winograd.h"
#include "nan_watch.h"
#include "onednn/onednn.h"
#include "scratch.h"

namespace jaxfuse::conv {
namespace {

Forward checked(const Call& call) {
  const bool has_scale = call.attr<bool>("has_scale"), has_bias = call.attr<bool>("has_bias"),
             has_residual = call.attr<bool>("has_residual"), save_z = call.attr<bool>("save_z");
  call.expect_counts(2 + has_scale + has_bias + has_residual, 1 + save_z);
  Forward f{Geometry(call), call.operand(0, "x"), call.operand(1, "w"), {}, {}, {}, call.result(0, "y"),
            activation_attr(call), parameters_attr(call), call.attr<bool>("residual_last")};
  call.expect_dtype(f.x, {DType::F32, DType::BF16});
  if (f.w.dtype != DType::F32 || f.x.dtype != DType::BF16) call.expect_dtype(f.w, {f.x.dtype});
  call.expect_dtype(f.y, {f.x.dtype, DType::F32});
  f.geometry.check(call, f.x, f.w, f.y);
  const Shape features{f.y.shape[f.geometry.out_spec[1]]};
  size_t next = 2;
  if (has_scale) {
    f.scale = call.operand(next++, "scale");
    call.expect_dtype(*f.scale, {DType::F32});
    call.expect_shape(*f.scale, features);
  }
  if (has_bias) {
    f.bias = call.operand(next++, "bias");
    call.expect_dtype(*f.bias, {DType::F32, f.x.dtype});
    call.expect_shape(*f.bias, features);
  }
  if (has_residual) {
    f.residual = call.operand(next++, "residual");
    call.expect_dtype(*f.residual, {f.y.dtype});
    call.expect_shape(*f.residual, f.y.shape);
  }
  if (save_z) {
    f.z = call.result(1, "z");
    call.expect_dtype(*f.z, {f.y.dtype});
    call.expect_shape(*f.z, f.y.shape);
  }
  return f;
}

// run(epilogue): what follows `in` by our own loops.
template <class Run>
void with_epilogue(const Forward& f, const void* in, DType in_dtype, Run run) {
  const std::vector<float> bias = elements(f.bias);
  run(Epilogue{f.activation, f.parameters, in, in_dtype, f.scale ? f.scale->as<float>() : nullptr,
               f.bias ? bias.data() : nullptr, f.residual ? f.residual->data : nullptr, f.residual_last});
}

// y = activation(scale·in + bias + residual), or the residual last, by our own loops.
void finish(const Forward& f, const void* in, DType in_dtype) {
  with_epilogue(f, in, in_dtype, [&](const Epilogue& e) { run_epilogue(f.y, f.geometry.out_spec[1], e); });
}

// What computes the products: a product of matrices, the loops for depthwise convolutions or Winograd's, all ours, or oneDNN.
enum class Way { none, product, depthwise, winograd, contraction, onednn };

Way way(const Forward& f) {
  if (f.x.size() == 0 || f.w.size() == 0 || f.y.size() == 0) return Way::none;
  if (f.y.dtype != f.x.dtype) return contracted::takes(f.geometry, f.x, f.w, f.y) ? Way::contraction : Way::onednn;
  if (pointwise::takes(f.geometry, f.x, f.w)) return Way::product;
  if (depthwise::takes(depthwise::Pass::forward, f.geometry, f.x, f.w, f.y)) return Way::depthwise;
  if (winograd::takes(f.geometry, f.x, f.w, f.y)) return Way::winograd;
  return contracted::takes(f.geometry, f.x, f.w, f.y) ? Way::contraction : Way::onednn;
}

// The same with a filter of x's type; `memory` is for one that is rounded to it, and null where none is computed.
Forward with_rounded_filter(const Forward& f, char* memory) {
  Forward rounded = f;
  if (f.w.dtype == f.x.dtype) return rounded;
  rounded.w = {f.w.name, memory, f.x.dtype, f.w.shape};
  const Epilogue rounding{Activation::none, {}, f.w.data, f.w.dtype, nullptr, nullptr, nullptr, false};
  if (memory) run_epilogue(rounded.w, int64_t(f.w.shape.size()) - 1, rounding);
  return rounded;
}

unsigned libraries(const Call& call) {
  if (way(checked(call)) == Way::contraction) return kNative;
  const Forward f = with_rounded_filter(checked(call), nullptr);
  if (way(f) != Way::onednn) return kNative;
  const bool slow = onednn::is_loaded() && !onednn::is_fast(f.geometry, f.x, f.w, f.y);
  return slow ? kOneDNN | kReference : unsigned(kOneDNN);
}

void run_depthwise(const Forward& f) {
  with_epilogue(f, nullptr, f.y.dtype, [&](const Epilogue& e) { depthwise::forward(f.geometry, f.x, f.w, f.y, e); });
}

// z, into y.
Forward up_to_activation(Forward f) {
  f.activation = Activation::none;
  if (f.residual_last) f.residual.reset();
  return f;
}

// y from z.
void activate(const Forward& f, const void* z) {
  Forward rest{f.geometry, f.x, f.w, {}, {}, {}, f.y, f.activation, f.parameters, f.residual_last};
  if (f.residual_last) rest.residual = f.residual;
  finish(rest, z, f.y.dtype);
}

// The convolution alone by oneDNN, into f32, to be rounded once.
void run_bare(const Forward& f) {
  const Scratch z(f.y.size() * sizeof(float));
  onednn::convolve(f.geometry, f.x, f.w, {f.y.name, z.data(), DType::F32, f.y.shape});
  finish(f, z.data(), DType::F32);
}

// The convolution with whatever oneDNN can add to it at full speed, and the rest by us.
void run_apart(const Forward& f) {
  if (!onednn::convolve(up_to_activation(f), f.y.data)) return run_bare(f);
  if (f.activation != Activation::none || f.residual_last) activate(f, f.y.data);
}

// Whether the activation is better applied by us than inside oneDNN's convolution.
bool better_apart(const Forward& f) {
  return f.activation == Activation::none || !onednn::has_post_ops(f.activation, f.parameters, f.y.dtype);
}

void run_fused(const Forward& f) {
  const NanWatch watch;
  if (!onednn::convolve(f, f.y.data)) return run_apart(f);
  if (!watch.perhaps_nan()) return;
  // The numbers that are right stay: whether a false alarm brought us here must not show in them.
  const Scratch z(f.y.bytes());
  if (!onednn::convolve(up_to_activation(f), z.data())) return run_apart(f);
  const void* added = f.residual_last ? f.residual->data : nullptr;
  restore_not_finite(f.y, f.geometry.out_spec[1], z.data(), f.activation, f.parameters, added);
}

// In f32 from bf16: nothing is rounded.
void run_widening(const Forward& f) {
  onednn::convolve(f.geometry, f.x, f.w, f.y);
  finish(f, f.y.data, DType::F32);
}

void run_onednn(const Forward& f) {
  if (f.y.dtype != f.x.dtype) return run_widening(f);
  if (!onednn::has_kernels(f.x.dtype)) return run_bare(f);
  better_apart(f) ? run_apart(f) : run_fused(f);
}

// run(f), by way of z where that is to be kept.
void run_saving(const Forward& f, void (*run)(const Forward&)) {
  if (!f.z) return run(f);
  Forward z = up_to_activation(f);
  z.y = *f.z;
  run(z);
  activate(f, f.z->data);
}

void run_without_products(const Forward& f) {
  if (f.y.size() == 0) return;
  if (f.z) {
    Forward z = up_to_activation(f);
    z.y = *f.z;
    finish(z, nullptr, f.y.dtype);
  }
  finish(f, nullptr, f.y.dtype);
}

void run(const Forward& f) {
  switch (way(f)) {
    case Way::none: return run_without_products(f);
    case Way::product: return pointwise::forward(f);
    case Way::depthwise: return run_saving(f, run_depthwise);
    case Way::winograd:
      if (winograd::forward(f)) return;
      [[fallthrough]];  // infinities as they are
    case Way::contraction:
    case Way::onednn:
      onednn::require();
      return run_saving(f, run_onednn);
  }
}

void conv_fwd(const Call& call) {
  const Forward f = checked(call);
  if (way(f) == Way::contraction && contracted::forward(f)) return;  // else infinities as they are
  const Scratch rounded(f.w.dtype == f.x.dtype ? 0 : f.w.size() * ffi::ByteWidth(f.x.dtype));
  run(with_rounded_filter(f, rounded.data()));
}

JAXFUSE_HANDLER(jaxfuse_conv_fwd, conv_fwd);
JAXFUSE_CHOICE(jaxfuse_conv_fwd, libraries);

}  // namespace
}  // namespace jaxfuse::conv
