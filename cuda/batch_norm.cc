// Batch norm's FFI targets on CUDA, with the operands, results and attributes of xla_ext/batch_norm.cc. The two that sum over rows
// have one more result, memory for partial sums: f32 (parts, 2, channels), any parts from 1 on.
#include "batch_norm.h"

#include <string_view>

#include "activation_attr.h"
#include "handler.h"

namespace jaxfuse::cuda::batch_norm {
namespace {

bool has_mask(Activation activation) {
  return activation == Activation::relu || activation == Activation::maximum0 || activation == Activation::relu6 ||
         activation == Activation::clip6;
}

// Reads tensors off a call into Args, all of the shape of x.
class Reader {
 public:
  Args args{};

  Reader(const Call& call, size_t x) : call_(call), x_(call.operand(x, "x")) {
    call.expect_dtype(x_, {DType::F32, DType::BF16, DType::F16});
    if (x_.shape.size() < 2) call.refuse("x has shape ", to_string(x_.shape), ", expected at least 2 dimensions");
    if (x_.size() == 0) call.refuse("x has shape ", to_string(x_.shape), ", expected one with elements");
    args.element = x_.dtype == DType::F32 ? Element::f32 : x_.dtype == DType::BF16 ? Element::bf16 : Element::f16;
    args.channels = x_.shape.back();
    args.rows = x_.size() / args.channels;
    args.aligned = args.channels % 8 == 0;
    args.x = full(x_);
  }

  void* full(const Tensor& t) { return at_16_bytes(checked(t, x_.dtype, x_.shape).data); }
  float* vector(const Tensor& t) {
    return static_cast<float*>(at_16_bytes(checked(t, DType::F32, {args.channels}).data));
  }
  uint8_t* mask(const Tensor& t) {
    return checked(t, DType::U8, {args.rows, (args.channels + 7) / 8}).as<uint8_t>();
  }
  void affine(size_t first) {
    args.center = vector(call_.operand(first, "center"));
    args.scale = vector(call_.operand(first + 1, "scale"));
    args.offset = vector(call_.operand(first + 2, "offset"));
  }
  void sums(const char* first, const char* second) {
    args.first = vector(call_.result(0, first));
    args.second = vector(call_.result(1, second));
    const Tensor workspace = call_.result(2, "workspace");
    const int64_t parts = workspace.shape.empty() ? 0 : workspace.shape[0];
    if (parts < 1 || parts > 65535) call_.refuse("workspace has shape ", to_string(workspace.shape), ", expected 1 to 65535 parts");
    args.partials = checked(workspace, DType::F32, {parts, 2, args.channels}).as<float>();
    args.parts = int32_t(parts);
  }

 private:
  const Tensor& checked(const Tensor& t, DType dtype, const Shape& shape) const {
    call_.expect_dtype(t, {dtype});
    call_.expect_shape(t, shape);
    return t;
  }
  void* at_16_bytes(void* data) {
    args.aligned &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
    return data;
  }

  const Call& call_;
  Tensor x_;
};

void stats_handler(const Call& call, cudaStream_t stream) {
  call.expect_counts(1, 3);
  Reader reader(call, 0);
  reader.sums("mean", "var");
  stats(reader.args, stream);
}

void apply_handler(const Call& call, cudaStream_t stream) {
  const bool has_residual = call.attr<bool>("has_residual"), save_mask = call.attr<bool>("save_mask");
  call.expect_counts(4 + has_residual, 1 + save_mask);
  Reader reader(call, 0);
  Args& args = reader.args;
  args.activation = activation_attr(call);
  args.alpha = call.attr<float>("alpha");
  if (save_mask && !has_mask(args.activation)) {
    call.refuse("attribute save_mask is true but the derivative of activation ", call.attr<std::string_view>("activation"),
                " is no mask");
  }
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
  args.alpha = call.attr<float>("alpha");
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
