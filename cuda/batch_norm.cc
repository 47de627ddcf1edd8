// Batch norm's FFI targets on CUDA, with the operands, results and attributes of xla_ext/batch_norm.cc. The two that sum over rows
// have one more result, memory for partial sums: f32 (parts, 2, channels), any parts from 1 on.
#include "batch_norm.h"

#include <string_view>

#include "activation_attr.h"
#include "reader.h"

namespace jaxfuse::cuda::batch_norm {
namespace {

class Reader : public cuda::Reader<Args> {
 public:
  Reader(const Call& call, size_t x) : cuda::Reader<Args>(call, call.operand(x, "x")) {
    if (x_.shape.size() < 2) call.refuse("x has shape ", to_string(x_.shape), ", expected at least 2 dimensions");
    if (x_.size() == 0) call.refuse("x has shape ", to_string(x_.shape), ", expected one with elements");
    args.channels = x_.shape.back();
    args.rows = x_.size() / args.channels;
    args.aligned = args.channels % 8 == 0;
    args.x = full(x_);
  }

  float* vector(const Tensor& t) { return numbers(t, {args.channels}); }
  uint8_t* mask(const Tensor& t) {
    return call_.checked(t, DType::U8, {args.rows, (args.channels + 7) / 8}).as<uint8_t>();
  }
  void affine(size_t first) {
    args.center = vector(call_.operand(first, "center"));
    args.scale = vector(call_.operand(first + 1, "scale"));
    args.offset = vector(call_.operand(first + 2, "offset"));
  }
  void sums(const char* first, const char* second) {
    args.first = vector(call_.result(0, first));
    args.second = vector(call_.result(1, second));
    partial_sums(call_.result(2, "workspace"), args.channels);
  }
};

void stats_handler(const Call& call, cudaStream_t stream) {
  call.expect_counts(1, 3);
  Reader reader(call, 0);
  reader.sums("mean", "var");
  stats(reader.args, stream);
}

void apply_handler(const Call& call, cudaStream_t stream) {
  const bool has_residual = call.attr<bool>("has_residual");
  const Activation activation = activation_attr(call);
  const Parameters parameters = parameters_attr(call);
  const bool save_mask = save_mask_attr(call, activation, parameters);
  call.expect_counts(4 + has_residual, 1 + save_mask);
  Reader reader(call, 0);
  Args& args = reader.args;
  args.activation = activation;
  args.parameters = parameters;
  reader.affine(1);
  if (has_residual) args.residual = reader.full(call.operand(4, "residual"));
  args.y = reader.full(call.result(0, "y"));
  if (save_mask) args.saved_mask = reader.mask(call.result(1, "mask"));
  apply(args, stream);
}

// What both backward targets have: operands dy, x, mean, `coefficients` of a, b, c, then those of the derivative: the mask,
// or center, scale, offset and the residual if there was one.
Reader backward(const Call& call, bool coefficients, size_t results) {
  const auto deriv = call.attr<std::string_view>("deriv");
  const bool by_mask = deriv == "mask", recomputes = deriv == "recompute";
  if (!by_mask && !recomputes && deriv != "none") {
    call.refuse("attribute deriv is \"", deriv, "\", expected none, mask or recompute");
  }
  const bool has_residual = recomputes && call.attr<bool>("has_residual");
  const size_t next = coefficients ? 6 : 3;
  call.expect_counts(next + (by_mask ? 1 : recomputes ? 3 + has_residual : 0), results);
  Reader reader(call, 1);
  Args& args = reader.args;
  args.activation = activation_attr(call);
  args.parameters = parameters_attr(call);
  if ((deriv == "none") != (args.activation == Activation::none)) {
    call.refuse("attributes activation = \"", call.attr<std::string_view>("activation"), "\" and deriv = \"", deriv,
                "\" contradict each other: deriv must be none where activation is none, mask or recompute elsewhere");
  }
  args.derivative = by_mask ? Derivative::mask : recomputes ? Derivative::recompute : Derivative::none;
  args.dy = reader.full(call.operand(0, "dy"));
  args.mean = reader.vector(call.operand(2, "mean"));
  if (coefficients) {
    args.a = reader.vector(call.operand(3, "a"));
    args.b = reader.vector(call.operand(4, "b"));
    args.c = reader.vector(call.operand(5, "c"));
  }
  if (by_mask) args.mask = reader.mask(call.operand(next, "mask"));
  if (recomputes) reader.affine(next);
  if (has_residual) args.residual = reader.full(call.operand(next + 3, "residual"));
  return reader;
}

void backward_stats_handler(const Call& call, cudaStream_t stream) {
  Reader reader = backward(call, false, 3);
  reader.sums("sum_g", "sum_gx");
  backward_stats(reader.args, stream);
}

void backward_apply_handler(const Call& call, cudaStream_t stream) {
  const bool want_dresidual = call.attr<bool>("want_dresidual");
  Reader reader = backward(call, true, 1 + want_dresidual);
  reader.args.dx = reader.full(call.result(0, "dx"));
  if (want_dresidual) reader.args.dresidual = reader.full(call.result(1, "dresidual"));
  backward_apply(reader.args, stream);
}

JAXFUSE_CUDA_HANDLER(jaxfuse_batch_norm_stats, stats_handler);
JAXFUSE_CUDA_HANDLER(jaxfuse_batch_norm_apply, apply_handler);
JAXFUSE_CUDA_HANDLER(jaxfuse_batch_norm_bwd_stats, backward_stats_handler);
JAXFUSE_CUDA_HANDLER(jaxfuse_batch_norm_bwd_apply, backward_apply_handler);

}  // namespace
}  // namespace jaxfuse::cuda::batch_norm
