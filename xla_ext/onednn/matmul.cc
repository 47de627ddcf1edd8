#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "dense_matmul.h"
#include "layouts.h"
#include "onednn.h"

namespace jaxfuse::onednn {
namespace {

using dnnl::memory;
using product::Matrix;

// Products in one f32 sum. oneDNN adds them to one number one after the other, XLA in blocks: with more of them its error
// would be the larger one, see "Dense layers" in benchmarks/results/kernels.md.
constexpr int64_t kLongestSum = 1024;
constexpr int64_t kSliceStep = 64;

struct Product {
  Shape batch;
  int64_t m, k, n;
  Matrix a, b, c;
  bool adds = false;  // to what c holds

  ElementType type() const {
    const bool narrow = a.dtype == DType::BF16 && b.dtype == DType::BF16;
    return narrow ? ElementType::bf16 : ElementType::f32;
  }
};

Shape dimensions(const Product& p, int64_t rows, int64_t columns) {
  Shape shape = p.batch;
  shape.push_back(rows);
  shape.push_back(columns);
  return shape;
}

// An axis of length 1 may have any stride; oneDNN knows a layout by the one that a dense tensor has.
memory::desc user(const Shape& shape, const Matrix& matrix) {
  Shape strides = matrix.strides;
  const size_t row = shape.size() - 2, column = row + 1;
  if (shape[column] == 1 && strides[row] != 1) strides[column] = 1;
  if (shape[row] == 1) strides[row] = strides[column] == 1 ? shape[column] : 1;
  return {shape, element_type(matrix.dtype), strides};
}

// The same, as `type` if it is of another.
memory::desc inner(const memory::desc& md, const Shape& shape, ElementType type) {
  return md.get_data_type() == type ? md : memory::desc(shape, type, row_major_strides(shape));
}

dnnl::matmul::primitive_desc descriptor(const Product& p, bool as_it_lies) {
  const Shape a = dimensions(p, p.m, p.k), b = dimensions(p, p.k, p.n), c = dimensions(p, p.m, p.n);
  dnnl::primitive_attr attr = attributes();
  if (p.adds) {
    dnnl::post_ops ops;
    ops.append_sum();
    attr.set_post_ops(ops);
  }
  const ElementType type = p.type(), out = type == ElementType::f32 ? type : element_type(p.c.dtype);
  const auto of = [&](const Shape& shape, const Matrix& matrix, ElementType type) {
    return as_it_lies ? inner(user(shape, matrix), shape, type) : memory::desc(shape, type, row_major_strides(shape));
  };
  return {engine(), of(a, p.a, type), of(b, p.b, type), p.adds ? user(c, p.c) : of(c, p.c, out), attr};
}

SharedPrimitive make(const Product& p) {
  auto chosen = descriptor(p, true);
  if (std::string(chosen.impl_info_str()).find("ref") != std::string::npos) chosen = descriptor(p, false);
  return std::make_shared<Primitive>(
      chosen, dnnl::matmul(chosen),
      Primitive::Layouts{{DNNL_ARG_SRC, user(dimensions(p, p.m, p.k), p.a)},
                         {DNNL_ARG_WEIGHTS, user(dimensions(p, p.k, p.n), p.b)}},
      Primitive::Layouts{{DNNL_ARG_DST, user(dimensions(p, p.m, p.n), p.c)}});
}

void run(const Product& p) {
  constexpr int64_t kMatmul = 3;  // beside the kinds of keys that convolutions have
  Key key{kMatmul, p.adds, p.m, p.k, p.n, int64_t(p.batch.size())};
  key.insert(key.end(), p.batch.begin(), p.batch.end());
  for (const Matrix* matrix : {&p.a, &p.b, &p.c}) {
    key.push_back(int64_t(matrix->dtype));
    key.insert(key.end(), matrix->strides.begin(), matrix->strides.end());
  }
  cached(key, [&] { return make(p); })
      ->run({{DNNL_ARG_SRC, p.a.data}, {DNNL_ARG_WEIGHTS, p.b.data}, {DNNL_ARG_DST, p.c.data}});
}

}  // namespace

void matmul(const Shape& batch, int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Matrix& c) {
  const size_t row = batch.size(), column = row + 1;
  Product p{batch, m, k, n, a, b, c};
  const bool sliced = p.type() == ElementType::f32 && c.dtype == DType::F32 && k > kLongestSum;
  const int64_t count = sliced ? (k + kLongestSum - 1) / kLongestSum : 1;
  const int64_t step = sliced ? ((k + count - 1) / count + kSliceStep - 1) / kSliceStep * kSliceStep : k;
  for (int64_t begin = 0; begin < k; begin += step) {
    p.k = std::min(step, k - begin);
    p.a = a.from(column, begin), p.b = b.from(row, begin), p.adds = begin > 0;
    run(p);
  }
}

}  // namespace jaxfuse::onednn
