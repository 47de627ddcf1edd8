#include "conv.h"

#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "bf16.h"
#include "layouts.h"
#include "onednn.h"
#include "slices.h"
#include "thread_pool.h"

namespace jaxfuse::onednn {
namespace {

using conv::Forward, conv::Geometry;
using dnnl::algorithm;

// min(max(slope·z + shift, low), high)
struct Clip {
  float slope, shift, low, high;
};

// The function as a clip, if it is one and gives the sign of a zero at a bound as oneDNN does: that of the bound.
std::optional<Clip> as_clip(const Piecewise& f) {
  Clip clip{f.slopes[1], -f.slopes[1] * f.center + f.offsets[1], -INFINITY, INFINITY};
  for (const int side : {0, 1}) {
    if (std::isinf(f.bounds[side])) continue;
    const float bound = f.offsets[2 * side];
    if (f.slopes[2 * side] != 0 || (bound == 0 && (f.inward[side] || std::signbit(bound)))) return {};
    (side ? clip.high : clip.low) = bound;
  }
  if (!(clip.slope > 0)) return {};
  return clip;
}

// The slope below 0 of what is the identity above it.
std::optional<float> as_leaky_relu(const Piecewise& f) {
  const bool leaky = f.bounds[0] == 0 && std::isinf(f.bounds[1]) && f.center == 0 && f.slopes[0] > 0 && f.slopes[1] == 1;
  return leaky && f.offsets[0] == 0 && f.offsets[1] == 0 ? std::optional(f.slopes[0]) : std::nullopt;
}

void append(dnnl::post_ops& ops, const Clip& clip) {
  if (clip.low == 0 && clip.high == 1) return ops.append_eltwise(algorithm::eltwise_hardsigmoid, clip.slope, clip.shift);
  if (clip.slope != 1 || clip.shift != 0) ops.append_eltwise(algorithm::eltwise_linear, clip.slope, clip.shift);
  if (clip.low == 0 && std::isinf(clip.high)) return ops.append_eltwise(algorithm::eltwise_relu, 0, 0);
  ops.append_eltwise(algorithm::eltwise_clip, clip.low, clip.high);
}

bool append_linear(dnnl::post_ops& ops, const Piecewise& f) {
  const auto slope = as_leaky_relu(f);
  const auto clip = as_clip(f);
  if (slope) {
    ops.append_eltwise(algorithm::eltwise_relu, *slope, 0);
  } else if (clip) {
    append(ops, *clip);
  }
  return slope || clip;
}

bool append_gate(dnnl::post_ops& ops, const Piecewise& f) {
  const auto clip = as_clip(f);
  const bool is_hardswish = clip && clip->low == 0 && clip->high == 1;
  if (is_hardswish) ops.append_eltwise(algorithm::eltwise_hardswish, clip->slope, clip->shift);
  return is_hardswish;
}

// The activation as oneDNN's post-ops. False, and nothing appended, where it has none for these parameters, or none that is
// exact enough for y's dtype.
bool append(dnnl::post_ops& ops, Activation activation, const Parameters& p, DType dtype) {
  const bool f32 = dtype == DType::F32;
  const auto eltwise = [&](algorithm kind, float alpha = 0, float beta = 0) {
    ops.append_eltwise(kind, alpha, beta);
    return true;
  };
#define JAXFUSE_ROW(name, numbers, derivative_from, appended) \
  case Activation::name: return appended;
  switch (activation) { JAXFUSE_ACTIVATIONS(JAXFUSE_ROW) }
#undef JAXFUSE_ROW
  return false;
}

constexpr int post_op(int i) { return DNNL_ARG_ATTR_MULTIPLE_POST_OP(i) | DNNL_ARG_SRC_1; }

// What oneDNN is asked for, and the user's buffers that it will read.
struct Request {
  dnnl::primitive_desc descriptor;
  Primitive::Layouts inputs;
};

// Post-ops in order: what y holds, scale (then the bias, which must come after it), residual, activation; or the residual
// last. x, w, y and the residual are taken as `type` inside; a y of f32 stays one.
Request request(const Forward& f, ElementType type) {
  const Geometry& g = f.geometry;
  const Epilogue& e = f.epilogue;
  const auto x = data(f.x, g.lhs_spec), w = filter(g, f.w), y = data(e.y, g.out_spec);
  const ElementType out = e.y.dtype == DType::F32 ? ElementType::f32 : type;
  Primitive::Layouts inputs{{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}};
  dnnl::post_ops ops;
  if (f.adds) ops.append_sum();
  auto binary = [&](algorithm kind, const dnnl::memory::desc& user, const dnnl::memory::desc& wanted) {
    inputs.emplace_back(post_op(ops.len()), user);
    ops.append_binary(kind, wanted);
  };
  dnnl::memory::desc bias;
  const ElementType given = e.bias ? element_type(e.bias->dtype) : ElementType::f32;
  const ElementType wanted = type == ElementType::f32 ? type : given;
  if (e.scale) {
    const auto scale = per_feature(g, *e.scale, ElementType::f32);
    binary(algorithm::binary_mul, scale, scale);
    if (e.bias) binary(algorithm::binary_add, per_feature(g, *e.bias, given), per_feature(g, *e.bias, wanted));
  } else if (e.bias) {
    bias = {{e.bias->shape[0]}, wanted, dnnl::memory::format_tag::a};
    inputs.emplace_back(DNNL_ARG_BIAS, dnnl::memory::desc({e.bias->shape[0]}, given, dnnl::memory::format_tag::a));
  }
  if (e.residual && !e.residual_last) binary(algorithm::binary_add, y, channels_last(y, type));
  append(ops, e.activation, e.parameters, e.y.dtype);
  if (e.residual && e.residual_last) binary(algorithm::binary_add, y, channels_last(y, type));
  dnnl::primitive_attr attr = attributes();
  attr.set_post_ops(ops);
  const auto inner_x = channels_last(x, type), inner_w = any_layout(w, type), inner_y = channels_last(y, out);
  if (g.transposed()) {
    const Geometry a = g.adjoint(f.w);
    return {dnnl::deconvolution_forward::primitive_desc(
                engine(), dnnl::prop_kind::forward_inference, algorithm::deconvolution_direct, inner_x, inner_w, bias,
                inner_y, a.strides, holes(a), a.padding_low, a.padding_high, attr),
            inputs};
  }
  return {dnnl::convolution_forward::primitive_desc(
              engine(), dnnl::prop_kind::forward_inference, algorithm::convolution_direct, inner_x, inner_w, bias,
              inner_y, g.strides, holes(g), g.padding_low, g.padding_high, attr),
          inputs};
}

// oneDNN's bf16 matrix kernels take input features two at a time. Where their number is odd they multiply the last one's
// neighbour in memory, which belongs to another pixel or group, by a zero weight: an Inf or NaN there becomes a NaN here.
bool takes_in_a_neighbour(const Forward& f, const Request& request) {
  const int64_t features = f.geometry.inputs_per_group(f.w);
  const std::string implementation = request.descriptor.impl_info_str();
  return f.x.dtype == DType::BF16 && features % 2 && implementation.find("brgconv") != std::string::npos;
}

// As it will be run.
Request best_request(const Forward& f) {
  Request r = request(f, element_type(f.x.dtype));
  return takes_in_a_neighbour(f, r) ? request(f, ElementType::f32) : r;
}

bool is_slice(const Forward& f) { return f.geometry.filter_features > 0; }

// Null where oneDNN lacks the activation, where post-ops leave it with nothing but its reference code, which is slow without
// bounds, and where a slice is not for its matrix kernels.
SharedPrimitive make(const Forward& f) {
  const Epilogue& e = f.epilogue;
  if (!has_post_ops(e.activation, e.parameters, e.y.dtype)) return nullptr;
  const Request r = best_request(f);
  const bool has_extras = r.inputs.size() > 2 || e.activation != Activation::none;
  if (has_extras && is_reference(r.descriptor)) return nullptr;
  if (is_slice(f) && std::string(r.descriptor.impl_info_str()).find("brgconv") == std::string::npos) return nullptr;
  const Primitive::Layouts outputs{{DNNL_ARG_DST, data(e.y, f.geometry.out_spec)}};
  return std::make_shared<Primitive>(r.descriptor, dnnl::primitive(r.descriptor), r.inputs, outputs);
}

SharedPrimitive primitive(const Forward& f) {
  const Epilogue& e = f.epilogue;
  int32_t numbers[sizeof(Parameters) / sizeof(int32_t)];
  std::memcpy(numbers, &e.parameters, sizeof numbers);
  Key key{0, int64_t(e.activation), f.adds, e.residual_last, e.scale.has_value(), e.residual.has_value(),
          e.bias ? int64_t(e.bias->dtype) : -1};
  key.insert(key.end(), std::begin(numbers), std::end(numbers));
  for (const Tensor* t : {&f.x, &f.w, &e.y}) append_to(key, *t);
  append_to(key, f.geometry);
  return cached(key, [&] { return make(f); });
}

void run(const Primitive& primitive, const Forward& f, void* y) {
  const Epilogue& e = f.epilogue;
  std::vector<std::pair<int, const void*>> buffers;
  buffers.reserve(6);
  buffers.insert(buffers.end(), {{DNNL_ARG_SRC, f.x.data}, {DNNL_ARG_WEIGHTS, f.w.data}, {DNNL_ARG_DST, y}});
  int op = f.adds;
  if (e.scale) buffers.emplace_back(post_op(op++), e.scale->data);
  if (e.bias) buffers.emplace_back(e.scale ? post_op(op++) : DNNL_ARG_BIAS, e.bias->data);
  if (e.residual_last) {
    dnnl::post_ops before;
    append(before, e.activation, e.parameters, e.y.dtype);
    op += before.len();
  }
  if (e.residual) buffers.emplace_back(post_op(op), e.residual->data);
  primitive.run(buffers);
}

// x (*) w and nothing else.
Forward bare(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y) {
  return {geometry, x, w, {y}};
}

bool run_sliced(const Forward& f, void* y) {
  const int64_t n = slice_count(f.geometry, f.x, f.w, f.y());
  if (n == 1) return false;
  std::vector<Forward> parts;
  std::vector<SharedPrimitive> primitives;
  for (int64_t i = 0; i < n; ++i) {
    const Slice slice(f.geometry, f.x, f.w, f.y(), i, n);
    Forward part = i + 1 < n ? bare(slice.geometry, slice.x, slice.w, f.y()) : f;
    part.geometry = slice.geometry, part.x = slice.x, part.w = slice.w, part.adds = i > 0;
    parts.push_back(part);
    primitives.push_back(primitive(part));
    if (!primitives.back()) return false;
  }
  for (int64_t i = 0; i < n; ++i) run(*primitives[i], parts[i], y);
  return true;
}

}  // namespace

bool has_post_ops(Activation activation, const Parameters& parameters, DType dtype) {
  dnnl::post_ops ops;
  return append(ops, activation, parameters, dtype);
}

bool is_fast(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y) {
  Forward f = bare(geometry, x, w, y);
  if (!has_kernels(x.dtype)) f.x.dtype = f.w.dtype = f.epilogue.y.dtype = DType::F32;
  return !is_reference(best_request(f).descriptor);
}

bool convolve(const Forward& f, void* y) {
  if (run_sliced(f, y)) return true;
  const auto whole = primitive(f);
  if (whole) run(*whole, f, y);
  return whole != nullptr;
}

bool Repeated::convolve(const Forward& f, void* y) {
  const int threads = ThreadPool::instance().size();
  if (!whole_ || threads_ != threads) {
    if (slice_count(f.geometry, f.x, f.w, f.y()) > 1) return onednn::convolve(f, y);
    whole_ = primitive(f), threads_ = threads;
  }
  if (whole_) run(*whole_, f, y);
  return whole_ != nullptr;
}

void convolve(const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y) {
  if (has_kernels(x.dtype)) return (void)convolve(bare(geometry, x, w, y), y.data);
  const Wide wide_x(x), wide_w(w), wide_y(y);
  const Forward f = bare(geometry, *wide_x.load().tensor(), *wide_w.load().tensor(), *wide_y.tensor());
  run(*primitive(f), f, f.y().data);  // in one: no slices are needed for what is rounded to bf16
  wide_y.store();
}

}  // namespace jaxfuse::onednn
