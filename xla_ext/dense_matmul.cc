#include "dense_matmul.h"

#include <algorithm>

#include "epilogue.h"
#include "onednn/onednn.h"
#include "simd_level.h"

namespace jaxfuse::dense {
namespace {

void store(const product::Block& block, const Matrix& c) {
  const Matrix to = c.from(0, block.row).from(1, block.column);
  const epilogue::Tile tile{element_of(to.dtype), block.columns, to.strides[0], 0,       Activation::none, {},      block.sums,
                            block.stride,         true,          nullptr,       nullptr, nullptr,          false,   nullptr,
                            to.data};
  epilogue::kernels().apply(tile, 0, block.rows);
}

}  // namespace

bool by_onednn(std::initializer_list<DType> dtypes) {
  return simd_level() == SimdLevel::avx512 && std::all_of(dtypes.begin(), dtypes.end(), [](DType dtype) {
    return dtype == DType::F32 ? onednn::has_avx512() : dtype == DType::BF16 && onednn::has_bf16();
  });
}

void matmul(const Shape& batch, int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Matrix& c) {
  if (n > 1 && c.strides[batch.size() + 1] != 1) {  // rows are written: cᵀ = bᵀ·aᵀ
    return matmul(batch, n, k, m, b.transposed(), a.transposed(), c.transposed());
  }
  if (!by_onednn({a.dtype, b.dtype, c.dtype})) {
    return product::multiply(batch, m, k, n, a, b, [&](const product::Block& block) { store(block, c.entry(batch, block.entry)); });
  }
  onednn::matmul(batch, m, k, n, a, b, c);
}

}  // namespace jaxfuse::dense
