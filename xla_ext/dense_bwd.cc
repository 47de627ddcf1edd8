// jaxfuse_dense_bwd: the gradients of y = activation(z), z = x·w + bias + residual, activation' a function of y or of z:
//   g = dy·activation'(z)     dx = g·wᵀ     dw = xᵀ·g     dbias = Σ g     dresidual = g
#include <optional>

#include "activation_attr.h"
#include "dense.h"
#include "scratch.h"

namespace jaxfuse::dense {
namespace {

struct Backward {
  Sizes sizes;
  Activation activation;
  Parameters parameters;
  bool derivative_from_y;
  std::optional<Tensor> x, w, saved, dx, dw, db, dresidual;
  Tensor dy;
};

void check(const Call& call, const Backward& b) {
  const DType dtype = b.x ? b.x->dtype : b.w ? b.w->dtype : b.dy.dtype;
  call.expect_dtype(b.dy, {DType::F32, DType::BF16, DType::F16});
  call.expect_dtype(b.dy, {DType::F32, dtype});
  b.sizes.check_y(call, b.dy);
  for (const auto* t : {&b.x, &b.w, &b.dx, &b.dw}) {
    if (!*t) continue;
    call.expect_dtype(**t, {DType::F32, DType::BF16, DType::F16});
    call.expect_dtype(**t, {dtype});
    t == &b.x || t == &b.dx ? b.sizes.check_x(call, **t) : b.sizes.check_w(call, **t);
  }
  for (const Shape* strides : {b.dx ? &b.sizes.x_strides : nullptr, b.dw ? &b.sizes.w_strides : nullptr}) {
    if (strides && strides->end()[-1] != 1 && strides->end()[-2] != 1) {
      call.refuse("strides of a gradient are ", to_string(*strides), ", expected rows or columns side by side");
    }
  }
  for (const auto* t : {&b.saved, &b.dresidual}) {
    if (!*t) continue;
    call.expect_dtype(**t, {b.dy.dtype});
    b.sizes.check_y(call, **t);
  }
  if (b.db) b.sizes.check_bias(call, *b.db, {DType::F32});
}

Backward checked(const Call& call) {
  const bool want_dx = call.attr<bool>("want_dx"), want_dw = call.attr<bool>("want_dw"),
             want_db = call.attr<bool>("want_db"), want_dresidual = call.attr<bool>("want_dresidual");
  const Activation activation = activation_attr(call);
  const Parameters parameters = parameters_attr(call);
  Backward b{Sizes(call, call.operand(want_dw + want_dx, "dy")), activation, parameters,
             derivative_from_y_attr(call, activation, parameters), {}, {}, {}, {}, {}, {}, {}, {}};
  const bool has_saved = b.activation != Activation::none;
  call.expect_counts(want_dw + want_dx + 1 + has_saved, want_dx + want_dw + want_db + want_dresidual);
  size_t operand = 0, result = 0;
  if (want_dw) b.x = call.operand(operand++, "x");
  if (want_dx) b.w = call.operand(operand++, "w");
  b.dy = call.operand(operand++, "dy");
  if (has_saved) b.saved = call.operand(operand++, b.derivative_from_y ? "y" : "z");
  if (want_dx) b.dx = call.result(result++, "dx");
  if (want_dw) b.dw = call.result(result++, "dw");
  if (want_db) b.db = call.result(result++, "db");
  if (want_dresidual) b.dresidual = call.result(result++, "dresidual");
  check(call, b);
  return b;
}

// Whether the contraction computes dw: for many columns oneDNN takes up to twice as long (benchmarks/README.md).
bool contracts_dw(const Backward& b) {
  constexpr int64_t kManyColumns = 2560;
  const Sizes& s = b.sizes;
  if (!s.batch.empty() || s.w_strides[1] != 1 || !can_contract(s.x(*b.x), s.y(b.dy))) return false;
  return contraction::always() || (is_contraction_measured() && s.columns >= kManyColumns);
}

// dx and dw from g.
void products(const Backward& b, const Tensor& g) {
  const Sizes& s = b.sizes;
  if (b.dx) matmul(s.batch, s.rows, s.columns, s.inner, s.y(g), s.w(*b.w).transposed(), s.x(*b.dx));
  if (!b.dw) return;
  if (contracts_dw(b)) return contract_transposed(s.inner, s.rows, s.columns, s.x(*b.x), s.y(g), s.w(*b.dw));
  matmul(s.batch, s.inner, s.rows, s.columns, s.x(*b.x).transposed(), s.y(g), s.w(*b.dw));
}

unsigned libraries(const Call& call) {
  const Backward b = checked(call);
  const DType dtype = b.x ? b.x->dtype : b.w ? b.w->dtype : b.dy.dtype;
  return (b.dx || (b.dw && !contracts_dw(b))) && by_onednn({b.dy.dtype, dtype}) ? kOneDNN : kNative;
}

void dense_bwd(const Call& call) {
  const Backward b = checked(call);
  const bool g_is_dy = b.activation == Activation::none;
  const bool g_in_scratch = !g_is_dy && !b.dresidual && (b.dx || b.dw);
  const Scratch scratch(g_in_scratch ? b.dy.bytes() : 0);
  void* written = b.dresidual ? b.dresidual->data : g_in_scratch ? scratch.data() : nullptr;
  if (written || b.db) {
    const int64_t columns = b.sizes.columns;
    epilogue::gradient(b.dy, {b.dy.size() / columns, columns},
                       {b.activation, b.parameters, b.derivative_from_y, b.saved ? b.saved->data : nullptr}, written,
                       b.db ? b.db->as<float>() : nullptr);
  }
  Tensor g = b.dy;
  if (!g_is_dy) g.data = written;
  products(b, g);
}

JAXFUSE_HANDLER(jaxfuse_dense_bwd, dense_bwd);
JAXFUSE_CHOICE(jaxfuse_dense_bwd, libraries);

}  // namespace
}  // namespace jaxfuse::dense
