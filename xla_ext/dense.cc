// jaxfuse_dense_fwd: y = activation(x·w + bias + residual), and on request z = what the activation is applied to.
#include "dense.h"

#include <algorithm>

#include "activation_attr.h"
#include "scratch.h"

namespace jaxfuse::dense {
namespace {

struct Forward {
  Sizes sizes;
  Tensor x, w;
  Epilogue epilogue;
};

Forward checked(const Call& call) {
  const bool has_bias = call.attr<bool>("has_bias"), has_residual = call.attr<bool>("has_residual"),
             wants_z = call.results() == 2;
  call.expect_counts(2 + has_bias + has_residual, 1 + wants_z);
  Forward f{Sizes(call, call.result(0, "y")), call.operand(0, "x"), call.operand(1, "w"),
            {call.result(0, "y"), activation_attr(call), parameters_attr(call)}};
  Epilogue& e = f.epilogue;
  call.expect_dtype(f.x, {DType::F32, DType::BF16, DType::F16});
  call.expect_dtype(f.w, {f.x.dtype});
  call.expect_dtype(e.y, {f.x.dtype, DType::F32});
  f.sizes.check_x(call, f.x);
  f.sizes.check_w(call, f.w);
  f.sizes.check_y(call, e.y);
  if (has_bias) {
    e.bias = call.operand(2, "bias");
    e.y.dtype == DType::F16 ? f.sizes.check_bias(call, *e.bias, {DType::F32})
                            : f.sizes.check_bias(call, *e.bias, {DType::F32, e.y.dtype});
  }
  if (has_residual) e.residual = call.checked(call.operand(2 + has_bias, "residual"), e.y.dtype, e.y.shape);
  if (wants_z) e.z = call.checked(call.result(1, "z"), e.y.dtype, e.y.shape);
  return f;
}

// Elements of the output that are finished together: what oneDNN has written is still in the cache.
constexpr int64_t kBlockElements = 1 << 18;
constexpr int64_t kBlockRows = 16;

// The output cut along its first axis, batch or rows: the extent of a block.
int64_t block_extent(const Sizes& sizes) {
  const Shape shape = sizes.output();
  const int64_t wanted = std::max<int64_t>(1, kBlockElements / (size_of(shape) / shape[0]));
  return sizes.batch.empty() ? (wanted + kBlockRows - 1) / kBlockRows * kBlockRows : wanted;
}

void product(const Forward& f, int64_t begin, int64_t extent, const Matrix& out) {
  Sizes block = f.sizes;
  (block.batch.empty() ? block.rows : block.batch[0]) = extent;
  const Matrix w = f.sizes.w(f.w);
  matmul(block.batch, block.rows, block.inner, block.columns, f.sizes.x(f.x).from(0, begin),
         block.batch.empty() ? w : w.from(0, begin), out);
}

void run_in_blocks(const Forward& f) {
  const Tensor& y = f.epilogue.y;
  const bool bf16 = y.dtype == DType::BF16;
  const Shape shape = f.sizes.output(), strides = row_major_strides(shape);
  const int64_t step = std::min(shape[0], block_extent(f.sizes)), columns = f.sizes.columns;
  const epilogue::Tiles tiles(f.epilogue, {y.size() / columns, columns});
  const Scratch scratch(bf16 ? step * strides[0] * sizeof(float) : 0);
  for (int64_t begin = 0; begin < shape[0]; begin += step) {
    const int64_t extent = std::min(step, shape[0] - begin), offset = begin * strides[0];
    float* sums = bf16 ? scratch.as<float>() : y.as<float>() + offset;
    product(f, begin, extent, {sums, DType::F32, strides});
    epilogue::apply(tiles.tile(sums, DType::F32, columns, offset, 0, columns), extent * strides[0] / columns);
  }
}

// The part of the output that a block of sums, whose rows begin behind the first `before`, becomes.
template <class Block>
epilogue::Tile tile_of(const epilogue::Tiles& tiles, const Block& b, int64_t before, int64_t columns) {
  return tiles.tile(b.sums, DType::F32, b.stride, (before + b.row) * columns + b.column, b.column, b.columns);
}

// Whether the contraction computes it: for many columns oneDNN takes up to twice as long, and ours longer for few rows and long sums
// (benchmarks/README.md).
bool contracts(const Forward& f) {
  constexpr int64_t kManyRows = 1024, kManyColumns = 128;
  const Sizes& s = f.sizes;
  if (!s.batch.empty() || !can_contract(s.x(f.x), s.w(f.w))) return false;
  if (contraction::always()) return true;
  return is_contraction_measured() && s.w_strides[1] == 1 && s.columns >= kManyColumns && (s.columns >= 2 * s.inner || s.rows >= kManyRows);
}

void by_contraction(const Forward& f) {
  const Sizes& s = f.sizes;
  const epilogue::Tiles tiles(f.epilogue, {s.rows, s.columns});
  const auto tile = [&](const contraction::Block& b) { return tile_of(tiles, b, 0, s.columns); };
  contract(s.rows, s.inner, s.columns, s.x(f.x), s.w(f.w), [&](const auto& b) { epilogue::kernels().apply(tile(b), 0, b.rows); },
           [&](const auto& b) { epilogue::fetch(tile(b), b.rows); });
}

// What computes the products: the contraction, the loops of product.h, both ours, or oneDNN.
enum class Way { contraction, product, onednn };

Way way(const Forward& f) {
  if (contracts(f)) return Way::contraction;
  return by_onednn({f.x.dtype, f.w.dtype}) ? Way::onednn : Way::product;
}

unsigned libraries(const Call& call) { return way(checked(call)) == Way::onednn ? kOneDNN : kNative; }

void dense_fwd(const Call& call) {
  const Forward f = checked(call);
  const Sizes& s = f.sizes;
  const Epilogue& e = f.epilogue;
  switch (way(f)) {
    case Way::contraction: return by_contraction(f);
    case Way::product: return multiply(s.batch, s.rows, s.inner, s.columns, s.x(f.x), s.w(f.w), e);
    case Way::onednn: return e.is_identity() ? product(f, 0, s.output()[0], s.y(e.y)) : run_in_blocks(f);
  }
}

JAXFUSE_HANDLER(jaxfuse_dense_fwd, dense_fwd);
JAXFUSE_CHOICE(jaxfuse_dense_fwd, libraries);

// That the last element of a strided tensor is within the buffer, and that the tensor has as many as the buffer.
void check_extent(const Call& call, const Tensor& t, Shape shape, const Shape& strides) {
  if (strides.size() != shape.size()) call.refuse("strides of ", t.name, " are ", strides.size(), ", expected ", shape.size());
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (strides[d] < 0 || !add_product(shape[d] - 1, strides[d], last)) {
      call.refuse("strides of ", t.name, " are ", to_string(strides), ", expected none below 0, and within the buffer");
    }
  }
  if (t.size() != size_of(shape) || last >= t.size()) {
    call.refuse(t.name, " has shape ", to_string(t.shape), ", expected the elements of ", to_string(shape), " at strides ",
                to_string(strides));
  }
}

Shape with(Shape batch, int64_t rows, int64_t columns) {
  batch.push_back(rows);
  batch.push_back(columns);
  return batch;
}

}  // namespace

void multiply(const Shape& batch, int64_t rows, int64_t inner, int64_t columns, const Matrix& x, const Matrix& w,
              const Epilogue& epilogue) {
  const epilogue::Tiles tiles(epilogue, {size_of(batch) * rows, columns});
  product::multiply(batch, rows, inner, columns, x, w, [&](const product::Block& block) {
    epilogue::kernels().apply(tile_of(tiles, block, block.entry * rows, columns), 0, block.rows);
  });
}

Sizes::Sizes(const Call& call, const Tensor& output)
    : batch(call.int_array("batch")),
      rows(call.attr<int64_t>("rows")),
      inner(call.attr<int64_t>("inner")),
      columns(call.attr<int64_t>("columns")),
      x_strides(call.int_array("x_strides")),
      w_strides(call.int_array("w_strides")) {
  int64_t known = columns, *unknown = nullptr;
  for (int64_t& n : batch) n == -1 && !unknown ? void(unknown = &n) : void(known *= n);
  rows == -1 && !unknown ? void(unknown = &rows) : void(known *= rows);
  if (unknown && known > 0) *unknown = output.size() / known;
  Shape all = with(batch, rows, columns);
  all.push_back(inner);
  if (*std::min_element(all.begin(), all.end()) < 1) {
    call.refuse("sizes are ", to_string(all), ", expected positive numbers: batch, rows, columns, inner");
  }
}

Shape Sizes::output() const { return with(batch, rows, columns); }

void Sizes::check_x(const Call& call, const Tensor& t) const { check_extent(call, t, with(batch, rows, inner), x_strides); }
void Sizes::check_w(const Call& call, const Tensor& t) const {
  check_extent(call, t, with(batch, inner, columns), w_strides);
}
void Sizes::check_y(const Call& call, const Tensor& t) const {
  check_extent(call, t, output(), row_major_strides(output()));
}
void Sizes::check_bias(const Call& call, const Tensor& t, std::initializer_list<DType> allowed) const {
  call.expect_dtype(t, allowed);
  if (t.size() != columns) call.refuse(t.name, " has shape ", to_string(t.shape), ", expected ", columns, " elements");
}

}  // namespace jaxfuse::dense
