// jaxfuse_dense_fwd: y = activation(x·w + bias + residual), and on request z = what the activation is applied to.
#include "dense.h"

#include <algorithm>
#include <optional>

#include "activation_attr.h"
#include "bf16.h"
#include "conv.h"
#include "onednn.h"
#include "parallel.h"
#include "simd_level.h"

namespace jaxfuse::dense {
namespace {

struct Forward {
  Sizes sizes;
  Tensor x, w;
  std::optional<Tensor> bias, residual;
  Tensor y;
  std::optional<Tensor> z;
  Activation activation;
  float alpha;
};

Forward checked(const Call& call) {
  const bool has_bias = call.attr<bool>("has_bias"), has_residual = call.attr<bool>("has_residual"),
             wants_z = call.results() == 2;
  call.expect_counts(2 + has_bias + has_residual, 1 + wants_z);
  Forward f{Sizes(call), call.operand(0, "x"), call.operand(1, "w"), {}, {}, call.result(0, "y"), {},
            activation_attr(call), call.attr<float>("alpha")};
  call.expect_dtype(f.x, {DType::F32, DType::BF16, DType::F16});
  call.expect_dtype(f.w, {f.x.dtype});
  call.expect_dtype(f.y, {f.x.dtype, DType::F32});
  f.sizes.check_x(call, f.x);
  f.sizes.check_w(call, f.w);
  f.sizes.check_y(call, f.y);
  if (has_bias) {
    f.bias = call.operand(2, "bias");
    f.y.dtype == DType::F16 ? f.sizes.check_bias(call, *f.bias, {DType::F32})
                            : f.sizes.check_bias(call, *f.bias, {DType::F32, f.y.dtype});
  }
  if (has_residual) {
    f.residual = call.operand(2 + has_bias, "residual");
    call.expect_dtype(*f.residual, {f.y.dtype});
    call.expect_shape(*f.residual, f.y.shape);
  }
  if (wants_z) {
    f.z = call.result(1, "z");
    call.expect_dtype(*f.z, {f.y.dtype});
    call.expect_shape(*f.z, f.y.shape);
  }
  return f;
}

// Elements of the output that are finished together: what oneDNN has written is still in the cache.
constexpr int64_t kBlockElements = 1 << 18;
constexpr int64_t kBlockRows = 16, kChunkElements = 1 << 14;

// The output cut along its first axis, batch or rows: items of it in a block.
int64_t block_items(const Sizes& sizes) {
  const Shape shape = sizes.output();
  const int64_t wanted = std::max<int64_t>(1, kBlockElements / (size_of(shape) / shape[0]));
  return sizes.batch.empty() ? (wanted + kBlockRows - 1) / kBlockRows * kBlockRows : wanted;
}

void product(const Forward& f, int64_t begin, int64_t items, const Matrix& out) {
  Sizes block = f.sizes;
  (block.batch.empty() ? block.rows : block.batch[0]) = items;
  const Matrix w = f.sizes.w(f.w);
  matmul(block.batch, block.rows, block.inner, block.columns, f.sizes.x(f.x).from(0, begin),
         block.batch.empty() ? w : w.from(0, begin), out);
}

void finish(const EpilogueArgs& args, int64_t rows) {
  const int64_t step = std::max<int64_t>(1, kChunkElements / args.columns), chunks = (rows + step - 1) / step;
  parallel_for(chunks, [&](int64_t chunk) {
    kernels().epilogue(args, chunk * step, std::min(rows, (chunk + 1) * step));
  });
}

void run_in_blocks(const Forward& f) {
  const bool bf16 = f.y.dtype == DType::BF16;
  const std::vector<float> bias = elements(f.bias);
  const Shape shape = f.sizes.output(), strides = dense_strides(shape);
  const int64_t step = std::min(shape[0], block_items(f.sizes)), width = ffi::ByteWidth(f.y.dtype);
  const onednn::Scratch scratch(bf16 ? step * strides[0] * sizeof(float) : 0);
  for (int64_t begin = 0; begin < shape[0]; begin += step) {
    const int64_t items = std::min(step, shape[0] - begin), offset = begin * strides[0] * width;
    const auto at = [&](const std::optional<Tensor>& t) { return t ? t->as<char>() + offset : nullptr; };
    void* sums = bf16 ? scratch.data() : at(f.y);
    product(f, begin, items, {sums, DType::F32, strides});
    finish({element_of(f.y.dtype), f.sizes.columns, f.sizes.columns, f.sizes.columns, f.activation, f.alpha,
            static_cast<float*>(sums), bias.empty() ? nullptr : bias.data(), at(f.residual), at(f.z), at(f.y)},
           items * strides[0] / f.sizes.columns);
  }
}

// What our own product has in the cache is finished there.
void run_by_our_product(const Forward& f) {
  const std::vector<float> bias = elements(f.bias);
  const Sizes& s = f.sizes;
  product::multiply(s.batch, s.rows, s.inner, s.columns, s.x(f.x), s.w(f.w), [&](const product::Block& block) {
    const int64_t offset = ((block.item * s.rows + block.row) * s.columns + block.column) * ffi::ByteWidth(f.y.dtype);
    const auto at = [&](const std::optional<Tensor>& t) { return t ? t->as<char>() + offset : nullptr; };
    kernels().epilogue({element_of(f.y.dtype), block.columns, s.columns, block.stride, f.activation, f.alpha, block.sums,
                        bias.empty() ? nullptr : &bias[block.column], at(f.residual), at(f.z), at(f.y)},
                       0, block.rows);
  });
}

void dense_fwd(const Call& call) {
  const Forward f = checked(call);
  if (!by_onednn(f.x.dtype)) return run_by_our_product(f);
  const bool alone = !f.bias && !f.residual && !f.z && f.activation == Activation::none;
  alone ? product(f, 0, f.sizes.output()[0], f.sizes.y(f.y)) : run_in_blocks(f);
}

JAXFUSE_HANDLER(jaxfuse_dense_fwd, dense_fwd);

// That the last element of a strided tensor is within the buffer, and that the tensor has as many as the buffer.
void check_extent(const Call& call, const Tensor& t, Shape shape, const Shape& strides) {
  if (strides.size() != shape.size()) call.refuse("strides of ", t.name, " are ", strides.size(), ", expected ", shape.size());
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (strides[d] < 0) call.refuse("strides of ", t.name, " are ", to_string(strides), ", expected none below 0");
    last += (shape[d] - 1) * strides[d];
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

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

Sizes::Sizes(const Call& call)
    : batch(call.int_array("batch")),
      rows(call.attr<int64_t>("rows")),
      inner(call.attr<int64_t>("inner")),
      columns(call.attr<int64_t>("columns")),
      x_strides(call.int_array("x_strides")),
      w_strides(call.int_array("w_strides")) {
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
  check_extent(call, t, output(), dense_strides(output()));
}
void Sizes::check_bias(const Call& call, const Tensor& t, std::initializer_list<DType> allowed) const {
  call.expect_dtype(t, allowed);
  if (t.size() != columns) call.refuse(t.name, " has shape ", to_string(t.shape), ", expected ", columns, " elements");
}

}  // namespace jaxfuse::dense
