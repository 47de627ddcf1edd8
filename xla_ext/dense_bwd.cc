// jaxfuse_dense_bwd: the gradients of y = activation(z), z = x·w + bias + residual, activation' told by y or by z:
//   g = dy·activation'(z)     dx = g·wᵀ     dw = xᵀ·g     dbias = Σ g     dresidual = g
#include <algorithm>
#include <optional>

#include "activation_attr.h"
#include "bf16.h"
#include "dense.h"
#include "parallel.h"
#include "scratch.h"

namespace jaxfuse::dense {
namespace {

struct Backward {
  Sizes sizes;
  Activation activation;
  Parameters parameters;
  bool by_value;
  std::optional<Tensor> x, w, told, dx, dw, db, dresidual;
  Tensor dy;
};

void check(const Call& call, const Backward& b) {
  const DType dtype = b.x ? b.x->dtype : b.w ? b.w->dtype : b.dy.dtype;
  call.expect_dtype(b.dy, {DType::F32, dtype});
  b.sizes.check_y(call, b.dy);
  for (const auto* t : {&b.x, &b.w, &b.dx, &b.dw}) {
    if (!*t) continue;
    call.expect_dtype(**t, {DType::F32, DType::BF16, DType::F16});
    call.expect_dtype(**t, {dtype});
    t == &b.x || t == &b.dx ? b.sizes.check_x(call, **t) : b.sizes.check_w(call, **t);
  }
  for (const auto* t : {&b.told, &b.dresidual}) {
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
             by_value_attr(call, activation, parameters), {}, {}, {}, {}, {}, {}, {}, {}};
  const bool told = b.activation != Activation::none;
  call.expect_counts(want_dw + want_dx + 1 + told, want_dx + want_dw + want_db + want_dresidual);
  size_t operand = 0, result = 0;
  if (want_dw) b.x = call.operand(operand++, "x");
  if (want_dx) b.w = call.operand(operand++, "w");
  b.dy = call.operand(operand++, "dy");
  if (told) b.told = call.operand(operand++, b.by_value ? "y" : "z");
  if (want_dx) b.dx = call.result(result++, "dx");
  if (want_dw) b.dw = call.result(result++, "dw");
  if (want_db) b.db = call.result(result++, "db");
  if (want_dresidual) b.dresidual = call.result(result++, "dresidual");
  check(call, b);
  return b;
}

constexpr int64_t kChunkElements = 1 << 15, kMostChunks = 256, kLongestSum = 1024;

// g (or null) and, where it is wanted, db. The chunks depend on the shape alone, and so does what is added to what, in f32
// kLongestSum rows at most.
void run_gradient(const Backward& b, void* g) {
  const GradientArgs args{element_of(b.dy.dtype), b.sizes.columns, b.activation, b.parameters, b.by_value, b.dy.data,
                          b.told ? b.told->data : nullptr, g};
  const int64_t columns = b.sizes.columns, rows = b.dy.size() / columns;
  const int64_t even = std::clamp<int64_t>(b.dy.size() / kChunkElements, 1, std::min(kMostChunks, rows));
  const int64_t wanted = std::max(even, (rows + kLongestSum - 1) / kLongestSum);
  const int64_t step = (rows + wanted - 1) / wanted, chunks = (rows + step - 1) / step;
  std::vector<float> sums(b.db ? chunks * columns : 0);
  parallel_for(chunks, [&](int64_t chunk) {
    kernels().gradient(args, chunk * step, std::min(rows, (chunk + 1) * step), b.db ? &sums[chunk * columns] : nullptr);
  });
  if (!b.db) return;
  for (int64_t c = 0; c < columns; ++c) {
    double total = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) total += sums[chunk * columns + c];
    b.db->as<float>()[c] = float(total);
  }
}

// dx and dw from g.
void products(const Backward& b, const Tensor& g) {
  const Sizes& s = b.sizes;
  if (b.dx) matmul(s.batch, s.rows, s.columns, s.inner, s.y(g), s.w(*b.w).transposed(), s.x(*b.dx));
  if (b.dw) matmul(s.batch, s.inner, s.rows, s.columns, s.x(*b.x).transposed(), s.y(g), s.w(*b.dw));
}

unsigned libraries(const Call& call) {
  const Backward b = checked(call);
  const DType dtype = b.x ? b.x->dtype : b.w ? b.w->dtype : b.dy.dtype;
  return (b.dx || b.dw) && by_onednn({b.dy.dtype, dtype}) ? kOneDNN : kNative;
}

void dense_bwd(const Call& call) {
  const Backward b = checked(call);
  const bool g_is_dy = b.activation == Activation::none;
  const bool g_in_scratch = !g_is_dy && !b.dresidual && (b.dx || b.dw);
  const Scratch scratch(g_in_scratch ? b.dy.bytes() : 0);
  void* written = b.dresidual ? b.dresidual->data : g_in_scratch ? scratch.data() : nullptr;
  if (written || b.db) run_gradient(b, written);
  Tensor g = b.dy;
  if (!g_is_dy) g.data = written;
  products(b, g);
}

JAXFUSE_HANDLER(jaxfuse_dense_bwd, dense_bwd);
JAXFUSE_CHOICE(jaxfuse_dense_bwd, libraries);

}  // namespace
}  // namespace jaxfuse::dense
