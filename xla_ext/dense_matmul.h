// Products of matrices that lie anywhere in memory with one step from row to row and one from column to column.
#pragma once

#include <initializer_list>

#include "contraction.h"
#include "product.h"

namespace jaxfuse::dense {

using product::Matrix;

// Whether products of these dtypes are oneDNN's: with AVX-512. Elsewhere our own loops (product.h) are faster and oneDNN has no
// bf16; f16 it has on the newest CPUs only.
bool by_onednn(std::initializer_list<DType> dtypes);

// c = a·b for each of the batch: [m, k]·[k, n], of f32, bf16 or f16, with sums in f32. No size may be 0.
void matmul(const Shape& batch, int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Matrix& c);

// a·b of f32 by the contraction, block by block of the result as contraction.h has it. a's rows have their elements side by side, b its
// rows or its columns.
bool can_contract(const Matrix& a, const Matrix& b);
void contract(int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const contraction::OfBlock& finish,
              const contraction::OfBlock& expect);

// Whether it was compared with oneDNN on this CPU.
bool is_contraction_measured();

// c = aᵀ·b so, where a's rows, of which there are k, have their elements side by side.
void contract_transposed(int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Matrix& c);

}  // namespace jaxfuse::dense
