#include "dense_matmul.h"

#include <algorithm>

#include "cut.h"
#include "epilogue.h"
#include "onednn/onednn.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::dense {
namespace {

template <class Block>
void store(const Block& block, const Matrix& c) {
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

bool can_contract(const Matrix& a, const Matrix& b) {
  if (a.strides.size() != 2 || a.dtype != DType::F32 || b.dtype != DType::F32) return false;
  return a.strides[1] == 1 && (b.strides[0] == 1 || b.strides[1] == 1);
}

void contract(int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const contraction::OfBlock& finish,
              const contraction::OfBlock& expect) {
  const auto rows = [&](int64_t first, int64_t count, const char** at, int64_t) {
    for (int64_t i = 0; i < count; ++i) at[i] = static_cast<const char*>(a.data) + (first + i) * a.strides[0] * int64_t(sizeof(float));
  };
  const std::vector<contraction::Problem> problems{{m, k, n, DType::F32, {b.data, DType::F32, {0}, b.strides[0], b.strides[1]}, rows}};
  contraction::Plans(problems).multiply(finish, expect);
}

bool is_contraction_measured() { return simd_level() == SimdLevel::avx512 && is_intel(); }

void contract_transposed(int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Matrix& c) {
  constexpr int64_t kTogether = 2 * contraction::kPositions, kApart = 16;  // that rows are not a power of two apart
  const int64_t copied = padded(k, contraction::kPositions), stride = copied + kApart;
  const Scratch rows(m * stride * int64_t(sizeof(float)));
  parallel_for(parts(copied, kTogether), [&](int64_t i) {
    const int64_t first = i * kTogether, count = std::min(kTogether, copied - first);
    const char* at[kTogether];
    for (int64_t j = 0; j < count; ++j) {
      at[j] = static_cast<const char*>(a.data) + std::min(first + j, k - 1) * a.strides[0] * int64_t(sizeof(float));
    }
    contraction::kernels().transpose_f32(at, count, m, reinterpret_cast<char*>(rows.as<float>() + first), stride * int64_t(sizeof(float)));
  });
  contract(m, k, n, {rows.data(), DType::F32, {stride, 1}}, b, [&](const auto& block) { store(block, c); }, [](const auto&) {});
}

}  // namespace jaxfuse::dense
