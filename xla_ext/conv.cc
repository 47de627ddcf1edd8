// jaxfuse_conv_fwd: y = activation(z), z = scale·conv(x, w) + bias + residual, in one pass over y; or the residual is added
// after the activation. With `save_z` z is a second result. y, and with it the residual and z, may be f32 where x is bf16.
#include "activation_attr.h"
#include "conv.h"
#include "conv_contraction.h"
#include "conv_depthwise.h"
#include "conv_pointwise.h"
#include "conv_winograd.h"
#include "invalid_flag.h"
#include "onednn/onednn.h"
#include "scratch.h"

namespace jaxfuse::conv {
namespace {

Forward checked(const Call& call) { return forward_of(call, call.operand(1, "w"), 1); }

// y by our own loops, from the convolution alone; null: from zeros.
void finish(const Forward& f, const void* sums, DType dtype) { epilogue::apply(f.epilogue, f.geometry.out_spec[1], sums, dtype); }

// What computes the products: one product of matrices, the loops for depthwise convolutions, Winograd's or the contraction, all
// ours, or oneDNN.
enum class Way { none, pointwise, depthwise, winograd, contraction, onednn };

Way way(const Forward& f) {
  if (f.x.size() == 0 || f.w.size() == 0 || f.y().size() == 0) return Way::none;
  const bool contracts = contracted::takes(f);
  if (f.y().dtype != f.x.dtype) return contracts ? Way::contraction : Way::onednn;
  if (pointwise::takes(f.geometry, f.x, f.w)) return Way::pointwise;
  if (depthwise::takes(f)) return Way::depthwise;
  if (winograd::takes(f.geometry, f.x, f.w, f.y())) return Way::winograd;
  return contracts ? Way::contraction : Way::onednn;
}

// The same with a filter of x's type; `memory` is for one that is rounded to it, and null where none is computed.
Forward with_rounded_filter(const Forward& f, char* memory) {
  Forward rounded = f;
  if (f.w.dtype == f.x.dtype) return rounded;
  rounded.w = {f.w.name, memory, f.x.dtype, f.w.shape};
  if (memory) epilogue::apply({rounded.w}, f.w.shape.size() - 1, f.w.data, f.w.dtype);
  return rounded;
}

unsigned libraries(const Call& call) {
  if (way(checked(call)) == Way::contraction) return kNative;
  const Forward f = with_rounded_filter(checked(call), nullptr);
  if (way(f) != Way::onednn) return kNative;
  const bool slow = onednn::is_loaded() && !onednn::is_fast(f.geometry, f.x, f.w, f.y());
  return slow ? kOneDNN | kReference : unsigned(kOneDNN);
}

// z, into the given tensor.
Forward up_to_activation(Forward f, const Tensor& z) {
  Epilogue& e = f.epilogue;
  e.y = z, e.activation = Activation::none, e.z.reset();
  if (e.residual_last) e.residual.reset();
  return f;
}

// What makes y of z.
Forward from_activation(Forward f) {
  Epilogue& e = f.epilogue;
  e.scale.reset(), e.bias.reset(), e.z.reset();
  if (!e.residual_last) e.residual.reset();
  return f;
}

void activate(const Forward& f, const void* z) { finish(from_activation(f), z, f.y().dtype); }

// The convolution alone by oneDNN, into f32, to be rounded once.
void run_bare(const Forward& f) {
  const Scratch z(f.y().size() * sizeof(float));
  onednn::convolve(f.geometry, f.x, f.w, {f.y().name, z.data(), DType::F32, f.y().shape});
  finish(f, z.data(), DType::F32);
}

// The convolution with whatever oneDNN can add to it at full speed, and the rest by us.
void run_apart(const Forward& f) {
  if (!onednn::convolve(up_to_activation(f, f.y()), f.y().data)) return run_bare(f);
  if (f.epilogue.activation != Activation::none || f.epilogue.residual_last) activate(f, f.y().data);
}

// Whether the activation is better applied by us than inside oneDNN's convolution.
bool better_apart(const Forward& f) {
  return f.epilogue.activation == Activation::none || !onednn::has_post_ops(f.epilogue.activation, f.epilogue.parameters, f.y().dtype);
}

void run_fused(const Forward& f, onednn::Repeated& repeated) {
  const InvalidFlagGuard guard;
  if (!repeated.convolve(f, f.y().data)) return run_apart(f);
  if (!guard.invalid_flag_raised()) return;
  // What is right stays: whether a false alarm brought us here must not show in it.
  const Scratch z(f.y().bytes());
  if (!onednn::convolve(up_to_activation(f, f.y()), z.data())) return run_apart(f);
  epilogue::restore_not_finite(from_activation(f).epilogue, z.data());
}

// In f32 from bf16: nothing is rounded.
void run_widening(const Forward& f) {
  onednn::convolve(f.geometry, f.x, f.w, f.y());
  finish(f, f.y().data, DType::F32);
}

void run_onednn(const Forward& f, onednn::Repeated& repeated) {
  if (f.y().dtype != f.x.dtype) return run_widening(f);
  if (!onednn::has_kernels(f.x.dtype)) return run_bare(f);
  better_apart(f) ? run_apart(f) : run_fused(f, repeated);
}

// run(f), by way of z where that is saved.
template <class Run>
void run_saving(const Forward& f, Run run) {
  if (!f.epilogue.z) return run(f);
  run(up_to_activation(f, *f.epilogue.z));
  activate(f, f.epilogue.z->data);
}

void run(const Forward& f, Way way, onednn::Repeated& repeated) {
  switch (way) {
    case Way::none: return finish(f, nullptr, f.y().dtype);
    case Way::pointwise: return pointwise::forward(f);
    case Way::depthwise: return run_saving(f, depthwise::forward);
    case Way::winograd:
      if (winograd::forward(f)) return;
      [[fallthrough]];  // infinities as they are
    case Way::contraction: return contracted::forward(f);
    case Way::onednn: onednn::require(); return run_saving(f, [&](const Forward& part) { run_onednn(part, repeated); });
  }
}

class ConvForward : public Kept::Object {
 public:
  explicit ConvForward(const Call& call)
      : f_(checked(call)),
        rounds_filter_(f_.w.dtype != f_.x.dtype && way(f_) != Way::contraction),  // which rounds it itself
        way_(rounds_filter_ ? way(with_rounded_filter(f_, nullptr)) : way(f_)) {}

  void run(const Call& call) {
    point_to(f_, call, 1);
    f_.w.data = call.operand_data(1);
    const Scratch rounded(rounds_filter_ ? f_.w.size() * ffi::ByteWidth(f_.x.dtype) : 0);
    conv::run(rounds_filter_ ? with_rounded_filter(f_, rounded.data()) : f_, way_, onednn_);
  }

 private:
  Forward f_;
  const bool rounds_filter_;
  const Way way_;
  onednn::Repeated onednn_;
};

JAXFUSE_KEEPING_HANDLER(jaxfuse_conv_fwd, ConvForward);
JAXFUSE_CHOICE(jaxfuse_conv_fwd, libraries);

}  // namespace
}  // namespace jaxfuse::conv
