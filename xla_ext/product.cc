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
                           kPackedFloats = 2 << 20, kFewestRows = 8 * kRows;
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
    padded_ = parts(rows, kRows) * kRows;
    const int64_t groups = parts(rows, Cut::kPackRows);
    parallel_for(items * groups, [&](int64_t i) {
      const int64_t first = i % groups * Cut::kPackRows, count = std::min(Cut::kPackRows, rows - first);
      const Matrix a = p_.a.item(p_.batch, item + i / groups);
      for (int64_t k = 0; k < p_.k; k += cut_.inner) {
        const Matrix from = a.from(0, row + first).from(1, k);
        const int64_t inner = std::min(cut_.inner, p_.k - k);
        kernels().pack_rows({element_of(a.dtype), from.data, a.strides[0], a.strides[1]}, count, inner,
                            const_cast<float*>(panel(i / groups, k, first)));
      }
    });
  }

  // Rows from `row` on of the item-th of those that were loaded, of the part that begins at k.
  const float* panel(int64_t item, int64_t k, int64_t row) const {
    return data_ + item * padded_ * p_.k + k * padded_ + row * std::min(cut_.inner, p_.k - k);
  }

 private:
  const Product& p_;
  const Cut& cut_;
  int64_t padded_ = 0;
  const Scratch scratch_;
  float* const data_;
};

// `rows` packed rows, from `row` on, times some columns of b.
void multiply_block(const Product& p, const Cut& cut, const PackedRows& packed, int64_t packed_item, int64_t item, int64_t row,
                    int64_t rows, int64_t column, float* b, float* sums) {
  const DenormalsFlushed mode;
  const int64_t columns = std::min(Cut::kBlockColumns, p.n - column);
  const Matrix from = p.b.item(p.batch, item).from(1, column);
  for (int64_t k = 0; k < p.k; k += cut.inner) {
    const int64_t inner = std::min(cut.inner, p.k - k);
    kernels().pack_columns({element_of(from.dtype), from.from(0, k).data, from.strides[1], from.strides[0]}, columns, inner, b);
    for (int64_t block = 0; block < rows; block += Cut::kBlockRows) {
      const int64_t end = std::min(rows, block + Cut::kBlockRows);
      for (int64_t c = 0; c < columns; c += kColumns) {
        for (int64_t r = block; r < end; r += kRows) {
          static constexpr int64_t kLine = 0;
          const Panels panels{packed.panel(packed_item, k, row + r), b + c * inner, &kLine, 1, inner, kRows, kColumns};
          kernels().outer_products(panels, std::min(kRows, rows - r), sums + r * Cut::kBlockColumns + c, Cut::kBlockColumns,
                                   k == 0);
        }
      }
    }
  }
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

void multiply(const Shape& batch, int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b,
              const std::function<void(const Block&)>& finish) {
  const Product p{m, k, n, batch, a, b};
  const Cut cut(p);
  PackedRows packed(p, cut);
  const int64_t all = size_of(batch), column_parts = parts(n, Cut::kBlockColumns);
  for (int64_t item = 0; item < all; item += cut.items) {
    const int64_t items = std::min(cut.items, all - item);
    for (int64_t first = 0; first < m; first += cut.rows) {
      const int64_t rows = std::min(cut.rows, m - first), row_parts = parts(rows, cut.task_rows);
      packed.load(item, items, first, rows);
      parallel_for(items * row_parts * column_parts, [&](int64_t i) {
        const int64_t row = i / column_parts % row_parts * cut.task_rows, column = i % column_parts * Cut::kBlockColumns;
        const int64_t some = std::min(cut.task_rows, rows - row), at = i / column_parts / row_parts;
        const Scratch scratch((cut.inner + parts(some, kRows) * kRows) * Cut::kBlockColumns * sizeof(float));
        float *columns = reinterpret_cast<float*>(scratch.data()), *sums = columns + cut.inner * Cut::kBlockColumns;
        multiply_block(p, cut, packed, at, item + at, row, some, column, columns, sums);
        finish({item + at, first + row, some, column, std::min(Cut::kBlockColumns, n - column), sums, Cut::kBlockColumns});
      });
    }
  }
}

}  // namespace jaxfuse::product
