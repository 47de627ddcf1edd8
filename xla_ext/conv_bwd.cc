// jaxfuse_conv_bwd: the gradients of y = activation(z), z = conv(x, w) + bias + residual, activation' a function of y or of z:
//   g = dy·activation'(z)     db = Σ g     dresidual = g     dx, dw = the convolution's own gradients at g
#include <cstring>
#include <optional>

#include "activation_attr.h"
#include "bf16.h"
#include "conv.h"
#include "conv_contraction.h"
#include "conv_contraction_filter.h"
#include "conv_depthwise.h"
#include "conv_filter.h"
#include "conv_pointwise.h"
#include "conv_winograd.h"
#include "onednn/onednn.h"
#include "scratch.h"

namespace jaxfuse::conv {
namespace {

struct Backward {
  Geometry geometry;
  std::optional<Tensor> x, w, saved, dx, dw, db, dresidual;  // saved: y if derivative_from_y, else z
  Tensor dy;
  Activation activation;
  Parameters parameters;
  bool derivative_from_y;
  bool dx_by_loops = false, dw_by_loops = false;  // those of conv_depthwise.h
};

void check(const Call& call, const Backward& b) {
  const DType dtype = b.dy.dtype;
  call.expect_dtype(b.dy, {DType::F32, DType::BF16});
  if (b.dy.shape.size() != b.geometry.out_spec.size()) {
    call.refuse("dy has shape ", to_string(b.dy.shape), ", expected ", b.geometry.out_spec.size(), " dimensions");
  }
  for (const auto* t : {&b.x, &b.w, &b.dx, &b.dresidual}) {
    if (*t) call.expect_dtype(**t, {dtype});
  }
  for (const auto* t : {&b.saved, &b.dresidual}) {
    if (*t) call.expect_shape(**t, b.dy.shape);
  }
  if (b.saved) call.expect_dtype(*b.saved, {dtype});
  for (const auto* t : {&b.dw, &b.db}) {
    if (*t) call.expect_dtype(**t, {DType::F32, dtype});
  }
  if (b.db) call.expect_shape(*b.db, {b.dy.shape[b.geometry.out_spec[1]]});
  if (b.dx) b.geometry.check(call, *b.dx, *b.w, b.dy);
  if (b.dw) b.geometry.check(call, *b.x, *b.dw, b.dy);
}

Backward checked(const Call& call) {
  const bool want_dx = call.attr<bool>("want_dx"), want_dw = call.attr<bool>("want_dw"),
             want_db = call.attr<bool>("want_db"), want_dresidual = call.attr<bool>("want_dresidual");
  const Activation activation = activation_attr(call);
  const Parameters parameters = parameters_attr(call);
  const bool derivative_from_y = derivative_from_y_attr(call, activation, parameters);
  call.expect_counts(want_dw + want_dx + 1 + (activation != Activation::none),
                     want_dx + want_dw + want_db + want_dresidual);
  size_t operand = 0, result = 0;
  auto next_operand = [&](bool present, const char* name) {
    return present ? std::optional(call.operand(operand++, name)) : std::nullopt;
  };
  auto next_result = [&](bool present, const char* name) {
    return present ? std::optional(call.result(result++, name)) : std::nullopt;
  };
  auto x = next_operand(want_dw, "x"), w = next_operand(want_dx, "w"), dy = next_operand(true, "dy"),
       saved = next_operand(activation != Activation::none, derivative_from_y ? "y" : "z");
  auto dx = next_result(want_dx, "dx"), dw = next_result(want_dw, "dw"), db = next_result(want_db, "db"),
       dresidual = next_result(want_dresidual, "dresidual");
  Backward b{Geometry(call), x, w, saved, dx, dw, db, dresidual, *dy, activation, parameters, derivative_from_y};
  check(call, b);
  b.dx_by_loops = b.dx && depthwise::takes_data_gradient(b.geometry, *b.dx, *b.w, b.dy);
  b.dw_by_loops = b.dw && depthwise::takes_weights_gradient(b.geometry, *b.x, *b.dw, b.dy);
  return b;
}

// Where it is nothing, or zeros.
bool is_trivial_data_gradient(const Tensor& dx, const Tensor& w, const Tensor& g) {
  if (dx.size() > 0 && w.size() > 0 && g.size() > 0) return false;
  if (dx.size() > 0) std::memset(dx.data, 0, dx.bytes());
  return true;
}

// A transposed convolution's is its adjoint's own forward pass.
void transposed_data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  if (is_trivial_data_gradient(dx, w, g)) return;
  const Forward f{geometry.adjoint(w), g, w, {dx}};
  contracted::takes(f) ? contracted::forward(f) : onednn::convolve(f.geometry, g, w, dx);
}

void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  if (is_trivial_data_gradient(dx, w, g)) return;
  if (winograd::takes_gradient(geometry, dx, w, g) && winograd::data_gradient(geometry, dx, w, g)) return;
  contracted::takes_gradient(geometry, dx, w, g) ? contracted::data_gradient(geometry, dx, w, g) : onednn::data_gradient(geometry, dx, w, g);
}

// What computes the gradient of a filter that is not depthwise::weights_gradient's.
enum class Sums { none, winograd, copies, loops, contraction, onednn };

Sums direct_sums_of(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  if (contracted::takes_filter_gradient(geometry, x, dw, g)) return Sums::contraction;
  const bool too_long = onednn::images_per_sum(geometry, dw, g) == 0;
  if (too_long && depthwise::has_single_inputs(geometry, dw)) return Sums::copies;
  return too_long || (x.dtype == DType::F32 && filter::is_faster(geometry, dw)) ? Sums::loops : Sums::onednn;
}

Sums sums_of(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  if (dw.size() == 0 || x.size() == 0 || g.size() == 0) return Sums::none;
  if (winograd::takes_filter_gradient(geometry, x, dw, g)) return Sums::winograd;
  return direct_sums_of(geometry, x, dw, g);
}

void sum_weights_gradient(Sums sums, const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  switch (sums) {
    case Sums::none: return dw.size() ? (void)std::memset(dw.data, 0, dw.bytes()) : void();
    case Sums::winograd:
      if (winograd::filter_gradient(geometry, x, dw, g)) return;
      return sum_weights_gradient(direct_sums_of(geometry, x, dw, g), geometry, x, dw, g);
    case Sums::copies: return depthwise::weights_gradient_of_copies(geometry, x, dw, g);
    case Sums::loops: return filter::gradient(geometry, x, dw, g);
    case Sums::contraction: return contracted::filter_gradient(geometry, x, dw, g);
    case Sums::onednn: return onednn::weights_gradient(geometry, x, dw, g);
  }
}

void weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  sum_weights_gradient(sums_of(geometry, x, dw, g), geometry, x, dw, g);
}

// function(geometry, x, dw, g) of the convolution whose filter's gradient dw is: a transposed one's is its adjoint's, from g to x.
template <class Function>
auto of_filter(const Backward& b, const Tensor& g, Function function) {
  return b.geometry.transposed() ? function(b.geometry.adjoint(*b.dw), g, *b.dw, *b.x) : function(b.geometry, *b.x, *b.dw, g);
}

// dx and dw from g. db is null, or the bias gradient that depthwise::weights_gradient finds on its way.
void gradients(const Backward& b, const Tensor& g, float* db) {
  if (b.dx) {
    const auto gradient = b.dx_by_loops ? depthwise::data_gradient : b.geometry.transposed() ? transposed_data_gradient : data_gradient;
    gradient(b.geometry, *b.dx, *b.w, g);
  }
  if (b.dw_by_loops) {
    depthwise::weights_gradient(b.geometry, *b.x, *b.dw, g, db);
  } else if (b.dw) {
    of_filter(b, g, weights_gradient);
  }
}

void gradients_in_f32(const Backward& b, const Tensor& g, float* db) {
  const Wide x(b.x), w(b.w), dx(b.dx), dw(b.dw), wide_g(g);
  Backward wide = b;
  wide.x = x.load().tensor(), wide.w = w.load().tensor(), wide.dx = dx.tensor(), wide.dw = dw.tensor();
  gradients(wide, *wide_g.load().tensor(), db);
  dx.store();
  dw.store();
}

// Whether dx and dw are products of matrices of our own.
bool are_pointwise(const Backward& b) {
  return b.dx ? pointwise::takes(b.geometry, *b.dx, *b.w) : b.dw && pointwise::takes(b.geometry, *b.x, *b.dw);
}

void products(const Backward& b, const Tensor& g) {
  if (b.dx) pointwise::data_gradient(b.geometry, *b.dx, *b.w, g);
  if (b.dw) pointwise::weights_gradient(b.geometry, *b.x, *b.dw, g);
}

// Whether oneDNN has a part in the gradients, and no fast kernels for it.
bool wants_f32(const Backward& b) {
  return !onednn::has_kernels(b.dy.dtype) && ((b.dx && !b.dx_by_loops) || (b.dw && !b.dw_by_loops));
}

// Whether oneDNN has fast code for dx.
bool is_fast_dx(const Backward& b) {
  if (b.dx->size() == 0 || b.w->size() == 0 || b.dy.size() == 0) return true;
  return b.geometry.transposed() ? onednn::is_fast(b.geometry.adjoint(*b.w), b.dy, *b.w, *b.dx)
                                 : onednn::is_fast_data_gradient(b.geometry, *b.dx, *b.w, b.dy);
}

bool contracted_dx(const Backward& b) {
  return b.geometry.transposed() ? contracted::takes({b.geometry.adjoint(*b.w), b.dy, *b.w, {*b.dx}})
                                 : contracted::takes_gradient(b.geometry, *b.dx, *b.w, b.dy);
}

unsigned libraries_of(Backward b) {
  if (are_pointwise(b)) return kNative;
  if (wants_f32(b)) {
    for (auto* t : {&b.x, &b.w, &b.dx, &b.dw}) {
      if (*t) (*t)->dtype = DType::F32;
    }
    b.dy.dtype = DType::F32;
  }
  const bool dx_by_onednn = b.dx && !b.dx_by_loops && !winograd::takes_gradient(b.geometry, *b.dx, *b.w, b.dy) &&
                            !contracted_dx(b),
             dw_by_onednn = b.dw && !b.dw_by_loops && of_filter(b, b.dy, sums_of) == Sums::onednn;
  const bool any_native = (b.dx && !dx_by_onednn) || (b.dw && !dw_by_onednn) || (!b.dx && !b.dw);
  const bool any_slow = onednn::is_loaded() && ((dx_by_onednn && !is_fast_dx(b)) ||
                                                (dw_by_onednn && !of_filter(b, b.dy, onednn::is_fast_weights_gradient)));
  return (dx_by_onednn || dw_by_onednn) * kOneDNN | any_native * kNative | any_slow * kReference;
}

unsigned libraries(const Call& call) { return libraries_of(checked(call)); }

void conv_bwd(const Call& call) {
  const Backward b = checked(call);
  if (!onednn::is_loaded() && (libraries_of(b) & kOneDNN)) onednn::require();
  const int64_t feature = b.geometry.out_spec[1];
  const bool g_is_dy = b.activation == Activation::none;
  const bool g_in_scratch = !g_is_dy && !b.dresidual && (b.dx || b.dw);
  const Scratch scratch(g_in_scratch ? b.dy.bytes() : 0);
  void* written = b.dresidual ? b.dresidual->data : g_in_scratch ? scratch.data() : nullptr;
  std::vector<float> sums(b.db ? b.dy.shape[feature] : 0);
  float* db = b.db ? sums.data() : nullptr;
  const bool db_with_dw = b.db && b.dw_by_loops;
  if (written || (b.db && !db_with_dw)) {
    epilogue::gradient(b.dy, epilogue::Rows(b.dy.shape, feature),
                       {b.activation, b.parameters, b.derivative_from_y, b.saved ? b.saved->data : nullptr}, written,
                       db_with_dw ? nullptr : db);
  }
  const Tensor g{b.dy.name, g_is_dy ? b.dy.data : written, b.dy.dtype, b.dy.shape};
  if (are_pointwise(b)) {
    products(b, g);
  } else {
    (wants_f32(b) ? gradients_in_f32 : gradients)(b, g, db_with_dw ? db : nullptr);
  }
  if (b.db) store(sums.data(), *b.db, {0, 1, int64_t(sums.size())});
}

JAXFUSE_HANDLER(jaxfuse_conv_bwd, conv_bwd);
JAXFUSE_CHOICE(jaxfuse_conv_bwd, libraries);

}  // namespace
}  // namespace jaxfuse::conv
