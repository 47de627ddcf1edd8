#include "product.h"

#include <algorithm>
#include <utility>

#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::product {
namespace {

int64_t parts(int64_t extent, int64_t size) { return (extent + size - 1) / size; }
int64_t even(int64_t extent, int64_t most) { return parts(extent, parts(extent, most)); }
int64_t even(int64_t extent, int64_t most, int64_t unit) { return parts(even(extent, most), unit) * unit; }

struct Product {
  int64_t m, k, n;
  Shape batch;
  Matrix a, b;
};

// How a product is cut. A sum is of products that follow one another, kInner at most, then added to those before: so long
// is a panel of b that stays in the first-level cache, and so short that the sums err less than XLA's. Packed rows of a
// lie in the second-level cache while the panels of b meet them; all that are packed at a time are in the third.
struct Cut {
  static constexpr int64_t kInner = 256, kBlockColumns = 4 * kColumns, kBlockRows = 32 * kRows, kPackRows = 16 * kRows,
                           kPackedFloats = 2 << 20, kFewestRows = 8 * kRows, kLongest = 1 << 16;
  int64_t inner;        // of a sum
  int64_t items, rows;  // packed at a time
  int64_t task_rows;    // of them, in one task

  explicit Cut(const Product& p) {
    inner = even(p.k, kInner);
    rows = even(p.m, std::max(kPackRows, kPackedFloats / p.k), kRows);
    items = std::clamp<int64_t>(kPackedFloats / (rows * p.k), 1, size_of(p.batch));
    const int64_t wanted = parts(4 * max_threads(), items * parts(p.n, kBlockColumns));
    task_rows = even(rows, std::max(kFewestRows, rows / wanted), kRows);
  }
};

// Some rows of some items, packed: for each item and each sum's part of the inner axis one panel after the other.
class PackedRows {
 public:
  PackedRows(const Product& p, const Cut& cut)
      : p_(p), cut_(cut), scratch_(cut.items * cut.rows * p.k * sizeof(float)), data_(reinterpret_cast<float*>(scratch_.data())) {}

  void load(int64_t item, int64_t items, int64_t row, int64_t rows) {
    item_ = item, row_ = row, padded_ = parts(rows, kRows) * kRows;
    const int64_t groups = parts(rows, Cut::kPackRows);
    parallel_for(items * groups, [&](int64_t i) {
      const int64_t of = item + i / groups, first = row + i % groups * Cut::kPackRows;
      const Matrix a = p_.a.item(p_.batch, of).from(0, first);
      for (int64_t k = 0; k < p_.k; k += cut_.inner) {
        kernels().pack_rows({element_of(a.dtype), a.from(1, k).data, a.strides[0], a.strides[1]},
                            std::min(Cut::kPackRows, row + rows - first), std::min(cut_.inner, p_.k - k), panel(of, k, first));
      }
    });
  }

  // Rows from `row` on of an item, of the part that begins at k.
  float* panel(int64_t item, int64_t k, int64_t row) const {
    return data_ + ((item - item_) * p_.k + k) * padded_ + (row - row_) * std::min(cut_.inner, p_.k - k);
  }

 private:
  const Product& p_;
  const Cut& cut_;
  int64_t item_ = 0, row_ = 0, padded_ = 0;
  const Scratch scratch_;
  float* const data_;
};

// The sums of a block, with memory for kInner rows of its columns.
void multiply_block(const Product& p, const Cut& cut, const PackedRows& packed, const Block& block, float* columns, float* sums) {
  static constexpr int64_t kLine = 0;
  const DenormalsFlushed mode;
  const Matrix b = p.b.item(p.batch, block.item).from(1, block.column);
  for (int64_t k = 0; k < p.k; k += cut.inner) {
    const int64_t inner = std::min(cut.inner, p.k - k);
    kernels().pack_columns({element_of(b.dtype), b.from(0, k).data, b.strides[1], b.strides[0]}, block.columns, inner, columns);
    for (int64_t first = 0; first < block.rows; first += Cut::kBlockRows) {
      const int64_t end = std::min(block.rows, first + Cut::kBlockRows);
      for (int64_t c = 0; c < block.columns; c += kColumns) {
        for (int64_t r = first; r < end; r += kRows) {
          const Panels panels{packed.panel(block.item, k, block.row + r), columns + c * inner, &kLine, 1, inner, kRows, kColumns};
          kernels().outer_products(panels, std::min(kRows, block.rows - r), sums + r * block.stride + c, block.stride, k == 0);
        }
      }
    }
  }
}

// Of sums so long that not even a few rows could be packed whole: of parts of them, which are added.
void multiply_long(const Product& p, const Finish& finish) {
  const size_t rows = p.batch.size(), columns = rows + 1;
  const Scratch scratch(size_of(p.batch) * p.m * p.n * sizeof(float));
  float* const total = reinterpret_cast<float*>(scratch.data());
  const auto at = [&](int64_t item, int64_t row) { return total + (item * p.m + row) * p.n; };
  const int64_t step = even(p.k, Cut::kLongest);
  for (int64_t k = 0; k < p.k; k += step) {
    multiply(p.batch, p.m, std::min(step, p.k - k), p.n, p.a.from(columns, k), p.b.from(rows, k), [&](const Block& block) {
      for (int64_t r = 0; r < block.rows; ++r) {
        const float* from = block.sums + r * block.stride;
        float* to = at(block.item, block.row + r) + block.column;
        for (int64_t c = 0; c < block.columns; ++c) to[c] = k == 0 ? from[c] : to[c] + from[c];
      }
    });
  }
  const int64_t row_parts = parts(p.m, Cut::kBlockRows);
  parallel_for(size_of(p.batch) * row_parts, [&](int64_t i) {
    const int64_t item = i / row_parts, row = i % row_parts * Cut::kBlockRows;
    finish({item, row, std::min(Cut::kBlockRows, p.m - row), 0, p.n, at(item, row), p.n});
  });
}

}  // namespace

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx2_kernels); }

Matrix Matrix::transposed() const {
  Matrix other = *this;
  std::swap(other.strides.end()[-1], other.strides.end()[-2]);
  return other;
}

Matrix Matrix::from(size_t axis, int64_t i) const {
  return {static_cast<char*>(data) + i * strides[axis] * ffi::ByteWidth(dtype), dtype, strides};
}

Matrix Matrix::item(const Shape& batch, int64_t item) const {
  Matrix one = *this;
  for (size_t axis = batch.size(); axis-- > 0; item /= batch[axis]) one = one.from(axis, item % batch[axis]);
  one.strides.erase(one.strides.begin(), one.strides.begin() + batch.size());
  return one;
}

void multiply(const Shape& batch, int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Finish& finish) {
  const Product p{m, k, n, batch, a, b};
  if (k > Cut::kLongest) return multiply_long(p, finish);
  const Cut cut(p);
  PackedRows packed(p, cut);
  const int64_t all = size_of(batch), column_parts = parts(n, Cut::kBlockColumns);
  for (int64_t item = 0; item < all; item += cut.items) {
    const int64_t items = std::min(cut.items, all - item);
    for (int64_t row = 0; row < m; row += cut.rows) {
      const int64_t rows = std::min(cut.rows, m - row), row_parts = parts(rows, cut.task_rows);
      packed.load(item, items, row, rows);
      parallel_for(items * row_parts * column_parts, [&](int64_t i) {
        const int64_t first = i / column_parts % row_parts * cut.task_rows, column = i % column_parts * Cut::kBlockColumns;
        Block block{item + i / column_parts / row_parts, row + first, std::min(cut.task_rows, rows - first),
                    column, std::min(Cut::kBlockColumns, n - column), nullptr, Cut::kBlockColumns};
        const int64_t padded = parts(block.rows, kRows) * kRows;
        const Scratch scratch((cut.inner + padded) * Cut::kBlockColumns * sizeof(float));
        float *columns = reinterpret_cast<float*>(scratch.data()), *sums = columns + cut.inner * Cut::kBlockColumns;
        multiply_block(p, cut, packed, block, columns, sums);
        block.sums = sums;
        finish(block);
      });
    }
  }
}

}  // namespace jaxfuse::product
