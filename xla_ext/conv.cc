// jaxfuse_conv_fwd: y = activation(z), z = scale·conv(x, w) + bias + residual, in one pass over y; or the residual is added
// after the activation. With `save_z` z is a second result.
#include "conv.h"

#include <cstring>
#include <optional>
#include <string>

#include "activation_attr.h"
#include "bf16.h"
#include "conv_depthwise.h"
#include "conv_epilogue.h"
#include "conv_slices.h"
#include "nan_watch.h"

namespace jaxfuse::conv {
namespace {

using dnnl::algorithm;

// The activation as oneDNN's post-ops.
void append(dnnl::post_ops& ops, Activation activation, float alpha) {
  switch (activation) {
    case Activation::none: return;
    case Activation::relu:
    case Activation::maximum0: return ops.append_eltwise(algorithm::eltwise_relu, 0, 0);
    case Activation::relu6:
    case Activation::clip6: return ops.append_eltwise(algorithm::eltwise_clip, 0, 6);
    case Activation::clip: return ops.append_eltwise(algorithm::eltwise_clip, 0, alpha);
    case Activation::hard_tanh: return ops.append_eltwise(algorithm::eltwise_clip, -1, 1);
    case Activation::leaky_relu: return ops.append_eltwise(algorithm::eltwise_relu, alpha, 0);
    case Activation::elu: return ops.append_eltwise(algorithm::eltwise_elu, alpha, 0);
    case Activation::selu:
      ops.append_eltwise(algorithm::eltwise_elu, 1.67326324f, 0);
      return ops.append_eltwise(algorithm::eltwise_linear, 1.05070099f, 0);
    case Activation::celu:
      ops.append_eltwise(algorithm::eltwise_linear, 1 / alpha, 0);
      ops.append_eltwise(algorithm::eltwise_elu, 1, 0);
      return ops.append_eltwise(algorithm::eltwise_linear, alpha, 0);
    case Activation::sigmoid: return ops.append_eltwise(algorithm::eltwise_logistic, 0, 0);
    case Activation::tanh: return ops.append_eltwise(algorithm::eltwise_tanh, 0, 0);
    case Activation::silu: return ops.append_eltwise(algorithm::eltwise_swish, 1, 0);
    case Activation::gelu: return ops.append_eltwise(algorithm::eltwise_gelu_erf, 0, 0);
    case Activation::gelu_tanh: return ops.append_eltwise(algorithm::eltwise_gelu_tanh, 0, 0);
    case Activation::mish: return ops.append_eltwise(algorithm::eltwise_mish, 0, 0);
    case Activation::hard_swish: return ops.append_eltwise(algorithm::eltwise_hardswish, 1.0f / 6, 0.5f);
    case Activation::hard_sigmoid: return ops.append_eltwise(algorithm::eltwise_hardsigmoid, 1.0f / 6, 0.5f);
    case Activation::softplus: return ops.append_eltwise(algorithm::eltwise_soft_relu, 1, 0);
    case Activation::relu_squared:
      ops.append_eltwise(algorithm::eltwise_relu, 0, 0);
      return ops.append_eltwise(algorithm::eltwise_square, 0, 0);
  }
}

struct Forward {
  Geometry geometry;
  Tensor x, w;
  std::optional<Tensor> scale, bias, residual;
  Tensor y;
  Activation activation;
  float alpha;
  bool residual_last = false;  // added after the activation
  std::optional<Tensor> z{};   // where to keep what the activation is applied to
  bool adds = false;           // to what y holds
};

Forward checked(const Call& call) {
  const bool has_scale = call.attr<bool>("has_scale"), has_bias = call.attr<bool>("has_bias"),
             has_residual = call.attr<bool>("has_residual"), save_z = call.attr<bool>("save_z");
  call.expect_counts(2 + has_scale + has_bias + has_residual, 1 + save_z);
  Forward f{Geometry(call), call.operand(0, "x"), call.operand(1, "w"), {}, {}, {}, call.result(0, "y"),
            activation_attr(call), call.attr<float>("alpha"), call.attr<bool>("residual_last")};
  call.expect_dtype(f.x, {DType::F32, DType::BF16});
  call.expect_dtype(f.w, {f.x.dtype});
  call.expect_dtype(f.y, {f.x.dtype});
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
    call.expect_dtype(*f.residual, {f.x.dtype});
    call.expect_shape(*f.residual, f.y.shape);
  }
  if (save_z) {
    f.z = call.result(1, "z");
    call.expect_dtype(*f.z, {f.y.dtype});
    call.expect_shape(*f.z, f.y.shape);
  }
  return f;
}

constexpr int post_op(int i) { return DNNL_ARG_ATTR_MULTIPLE_POST_OP(i) | DNNL_ARG_SRC_1; }

// What oneDNN is asked for, and the user's buffers that it will read.
struct Request {
  dnnl::primitive_desc descriptor;
  onednn::Primitive::Layouts inputs;
};

// Post-ops in order: what y holds, scale (then the bias, which must come after it), residual, activation; or the residual
// last. x, w, y and the residual are taken as `type` inside.
Request request(const Forward& f, ElementType type) {
  const Geometry& g = f.geometry;
  const auto x = g.data(f.x, g.lhs_spec), w = g.filter(f.w), y = g.data(f.y, g.out_spec);
  onednn::Primitive::Layouts inputs{{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}};
  dnnl::post_ops ops;
  if (f.adds) ops.append_sum();
  auto binary = [&](algorithm kind, const dnnl::memory::desc& user, const dnnl::memory::desc& wanted) {
    inputs.emplace_back(post_op(ops.len()), user);
    ops.append_binary(kind, wanted);
  };
  dnnl::memory::desc bias;
  const ElementType given = f.bias ? element_type(f.bias->dtype) : ElementType::f32;
  const ElementType wanted = type == ElementType::f32 ? type : given;
  if (f.scale) {
    const auto scale = g.per_feature(*f.scale, ElementType::f32);
    binary(algorithm::binary_mul, scale, scale);
    if (f.bias) binary(algorithm::binary_add, g.per_feature(*f.bias, given), g.per_feature(*f.bias, wanted));
  } else if (f.bias) {
    bias = {{f.bias->shape[0]}, wanted, dnnl::memory::format_tag::a};
    inputs.emplace_back(DNNL_ARG_BIAS, dnnl::memory::desc({f.bias->shape[0]}, given, dnnl::memory::format_tag::a));
  }
  if (f.residual && !f.residual_last) binary(algorithm::binary_add, y, channels_last(y, type));
  append(ops, f.activation, f.alpha);
  if (f.residual && f.residual_last) binary(algorithm::binary_add, y, channels_last(y, type));
  dnnl::primitive_attr attr = attributes();
  attr.set_post_ops(ops);
  const auto inner_x = channels_last(x, type), inner_w = any_layout(w, type), inner_y = channels_last(y, type);
  if (g.transposed()) {
    const Geometry a = g.adjoint(f.w);
    return {dnnl::deconvolution_forward::primitive_desc(
                onednn::engine(), dnnl::prop_kind::forward_inference, algorithm::deconvolution_direct, inner_x, inner_w, bias,
                inner_y, a.strides, a.onednn_dilation(), a.padding_low, a.padding_high, attr),
            inputs};
  }
  return {dnnl::convolution_forward::primitive_desc(
              onednn::engine(), dnnl::prop_kind::forward_inference, algorithm::convolution_direct, inner_x, inner_w, bias,
              inner_y, g.strides, g.onednn_dilation(), g.padding_low, g.padding_high, attr),
          inputs};
}

// oneDNN's bf16 matrix kernels take input features two at a time. Where their number is odd they multiply the last one's
// neighbour in memory, which belongs to another pixel or group, by a zero weight: an Inf or NaN there becomes a NaN here.
bool takes_in_a_neighbour(const Forward& f, const Request& request) {
  const int64_t features = f.geometry.inputs_per_group(f.w);
  const std::string implementation = request.descriptor.impl_info_str();
  return f.x.dtype == DType::BF16 && features % 2 && implementation.find("brgconv") != std::string::npos;
}

bool is_slice(const Forward& f) { return f.geometry.filter_features > 0; }

// Null where post-ops leave oneDNN with nothing but its reference code, which is slow without bounds, and where a slice
// is not for its matrix kernels.
onednn::SharedPrimitive make(const Forward& f) {
  Request r = request(f, element_type(f.x.dtype));
  if (takes_in_a_neighbour(f, r)) r = request(f, ElementType::f32);
  const std::string implementation = r.descriptor.impl_info_str();
  const bool has_extras = r.inputs.size() > 2 || f.activation != Activation::none;
  if (has_extras && implementation.substr(0, 3) == "ref") return nullptr;
  if (is_slice(f) && implementation.find("brgconv") == std::string::npos) return nullptr;
  const onednn::Primitive::Layouts outputs{{DNNL_ARG_DST, f.geometry.data(f.y, f.geometry.out_spec)}};
  return std::make_shared<onednn::Primitive>(r.descriptor, dnnl::primitive(r.descriptor), r.inputs, outputs);
}

onednn::SharedPrimitive primitive(const Forward& f) {
  int32_t alpha_bits;
  std::memcpy(&alpha_bits, &f.alpha, sizeof alpha_bits);
  onednn::Key key{0, int64_t(f.activation), alpha_bits, f.adds, f.residual_last, f.scale.has_value(),
                  f.residual.has_value(),
                  f.bias ? int64_t(f.bias->dtype) : -1};
  for (const Tensor* t : {&f.x, &f.w, &f.y}) append_to(key, *t);
  f.geometry.append_to(key);
  return onednn::cached(key, [&] { return make(f); });
}

void run(const onednn::Primitive& primitive, const Forward& f, void* y) {
  std::vector<std::pair<int, const void*>> buffers{
      {DNNL_ARG_SRC, f.x.data}, {DNNL_ARG_WEIGHTS, f.w.data}, {DNNL_ARG_DST, y}};
  int op = f.adds;
  if (f.scale) buffers.emplace_back(post_op(op++), f.scale->data);
  if (f.bias) buffers.emplace_back(f.scale ? post_op(op++) : DNNL_ARG_BIAS, f.bias->data);
  if (f.residual_last) {
    dnnl::post_ops before;
    append(before, f.activation, f.alpha);
    op += before.len();
  }
  if (f.residual) buffers.emplace_back(post_op(op), f.residual->data);
  primitive.run(buffers);
}

// x (*) w and nothing else, into y.
Forward bare(const Forward& f, const Tensor& y) {
  return {f.geometry, f.x, f.w, {}, {}, {}, y, Activation::none, 0};
}

bool run_sliced(const Forward& f, void* y) {
  const int64_t n = slice_count(f.geometry, f.x, f.w, f.y);
  if (n == 1) return false;
  std::vector<Forward> parts;
  std::vector<onednn::SharedPrimitive> primitives;
  for (int64_t i = 0; i < n; ++i) {
    const Slice slice(f.geometry, f.x, f.w, f.y, i, n);
    Forward part = i + 1 < n ? bare(f, f.y) : f;
    part.geometry = slice.geometry, part.x = slice.x, part.w = slice.w, part.adds = i > 0;
    parts.push_back(part);
    primitives.push_back(primitive(part));
    if (!primitives.back()) return false;
  }
  for (int64_t i = 0; i < n; ++i) run(*primitives[i], parts[i], y);
  return true;
}

// False, and nothing done, where oneDNN has no fast code.
bool run(const Forward& f, void* y) {
  if (run_sliced(f, y)) return true;
  const auto whole = primitive(f);
  if (whole) run(*whole, f, y);
  return whole != nullptr;
}

// run(epilogue): what follows `in` by our own loops.
template <class Run>
void with_epilogue(const Forward& f, const void* in, DType in_dtype, Run run) {
  const std::vector<float> bias = elements(f.bias);
  run(Epilogue{f.activation, f.alpha, in, in_dtype, f.scale ? f.scale->as<float>() : nullptr,
               f.bias ? bias.data() : nullptr, f.residual ? f.residual->data : nullptr, f.residual_last});
}

// y = activation(scale·in + bias + residual), or the residual last, by our own loops.
void finish(const Forward& f, const void* in, DType in_dtype) {
  with_epilogue(f, in, in_dtype, [&](const Epilogue& e) { run_epilogue(f.y, f.geometry.out_spec[1], e); });
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
  Forward rest = bare(f, f.y);
  rest.activation = f.activation, rest.alpha = f.alpha, rest.residual_last = f.residual_last;
  if (f.residual_last) rest.residual = f.residual;
  finish(rest, z, f.y.dtype);
}

// The convolution alone by oneDNN, into f32, to be rounded once.
void run_bare(const Forward& f) {
  const onednn::Scratch z(f.y.size() * sizeof(float));
  convolve(f.geometry, f.x, f.w, {f.y.name, z.data(), DType::F32, f.y.shape});
  finish(f, z.data(), DType::F32);
}

// The convolution with whatever oneDNN can add to it at full speed, and the rest by us.
void run_apart(const Forward& f) {
  if (!run(up_to_activation(f), f.y.data)) return run_bare(f);
  if (f.activation != Activation::none || f.residual_last) activate(f, f.y.data);
}

// Whether the activation is better applied by us than inside oneDNN's convolution.
bool better_apart(const Forward& f) {
  const bool f32 = f.y.dtype == DType::F32;
  switch (f.activation) {
    case Activation::none: return true;
    case Activation::elu:
    case Activation::selu:
    case Activation::celu:
    case Activation::gelu:
    case Activation::mish:
    case Activation::softplus:  // oneDNN is off by 1e-6, which is all of a small value, but does not show in bf16
      return f32;
    default: return false;
  }
}

void run_fused(const Forward& f) {
  const NanWatch watch;
  if (!run(f, f.y.data)) return run_apart(f);
  if (!watch.perhaps_nan()) return;
  // The numbers that are right stay: whether a false alarm brought us here must not show in them.
  const onednn::Scratch z(f.y.bytes());
  if (!run(up_to_activation(f), z.data())) return run_apart(f);
  const void* added = f.residual_last ? f.residual->data : nullptr;
  restore_not_finite(f.y, f.geometry.out_spec[1], z.data(), f.activation, f.alpha, added);
}

void run_whole(const Forward& f) {
  if (depthwise::takes(depthwise::Pass::forward, f.geometry, f.x, f.w, f.y)) return run_depthwise(f);
  if (!has_kernels(f.x.dtype)) return run_bare(f);
  better_apart(f) ? run_apart(f) : run_fused(f);
}

void run_saving(const Forward& f) {
  Forward z = up_to_activation(f);
  z.y = *f.z;
  run_whole(z);
  activate(f, f.z->data);
}

void conv_fwd(const Call& call) {
  const Forward f = checked(call);
  if (f.y.size() == 0) return;
  if (f.x.size() == 0 || f.w.size() == 0) {  // no products to sum
    if (f.z) {
      Forward z = up_to_activation(f);
      z.y = *f.z;
      finish(z, nullptr, f.y.dtype);
    }
    return finish(f, nullptr, f.y.dtype);
  }
  f.z ? run_saving(f) : run_whole(f);
}

JAXFUSE_HANDLER(jaxfuse_conv_fwd, conv_fwd);

}  // namespace

void convolve(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y) {
  const auto bare = [&](const Tensor& x, const Tensor& w, const Tensor& y) {
    return Forward{geometry, x, w, {}, {}, {}, y, Activation::none, 0};
  };
  if (has_kernels(x.dtype)) return (void)run(bare(x, w, y), y.data);
  const Wide wide_x(x), wide_w(w), wide_y(y);
  const Forward f = bare(*wide_x.load().tensor(), *wide_w.load().tensor(), *wide_y.tensor());
  run(*primitive(f), f, f.y.data);  // in one: no slices are needed for what is rounded to bf16
  wide_y.store();
}

}  // namespace jaxfuse::conv
