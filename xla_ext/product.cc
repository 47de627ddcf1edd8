#include "product.h"

#include <algorithm>
#include <utility>

#include "cut.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::product {
namespace {

// How a product is cut. A sum is of products that follow one another, kInner at most, then added to those before: so long
// is a panel of b that stays in the first-level cache, and so short that the sums err less than XLA's. Packed rows of a
// lie in the second-level cache while they are multiplied with the panels of b, and with them the sums of a task; all that are packed at a
// time are in the third.
constexpr int64_t kInner = 256, kBlockColumns = 4 * kColumns, kBlockRows = 16 * kMostRows, kPackRows = 8 * kMostRows,
                  kPackedFloats = 2 << 20, kFewestTaskRows = 4 * kMostRows, kMostTaskRows = 42 * kMostRows;

// Into how many parts sums of k products are cut, each computed as one more entry of the batch: where few rows of such a
// length could be packed at a time, and b would be packed again for each few, or where there are hardly any tasks. The sums
// of all parts take at most a quarter of the memory that a and b do, or each is of kLongest.
int64_t sum_parts(int64_t entries, int64_t m, int64_t k, int64_t n) {
  constexpr int64_t kManyRows = 512, kManyTasks = 16, kPart = 2048, kLongest = 1 << 16;
  const bool few_rows = kPackedFloats / k < std::min(m, kManyRows);
  const bool few_tasks = entries * parts(m, kFewestTaskRows) * parts(n, kBlockColumns) < kManyTasks;
  const int64_t wanted = few_rows || few_tasks ? parts(k, kPart) : 1;
  return std::max(std::min(wanted, (m + n) * k / (4 * m * n)), parts(k, kLongest));
}

struct Product {
  Shape batch;
  int64_t m, k, n;
  Matrix a, b;
  int64_t step = parts(k, sum_parts(size_of(batch), m, k, n)), parts_of_sum = parts(k, step);  // so that none is empty

  int64_t entries() const { return size_of(batch) * parts_of_sum; }
  int64_t begin(int64_t entry) const { return entry % parts_of_sum * step; }
  int64_t inner(int64_t entry) const { return std::min(step, k - begin(entry)); }
  Matrix a_of(int64_t entry) const { return a.entry(batch, entry / parts_of_sum).from(1, begin(entry)); }
  Matrix b_of(int64_t entry) const { return b.entry(batch, entry / parts_of_sum).from(0, begin(entry)); }
};

struct Cut {
  int64_t inner;        // of a sum
  int64_t entries, rows;  // packed at a time
  int64_t task_rows;    // of them, in one task

  explicit Cut(const Product& p) {
    inner = even(p.step, kInner);
    rows = padded(even(p.m, std::max(kPackRows, kPackedFloats / p.step)), kMostRows);
    entries = std::clamp<int64_t>(kPackedFloats / (rows * p.step), 1, p.entries());
    const int64_t wanted = parts(4 * max_threads(), entries * parts(p.n, kBlockColumns));
    task_rows = padded(even(rows, std::clamp(rows / wanted, kFewestTaskRows, kMostTaskRows)), kMostRows);
  }
};

void pack_rows(const Matrix& m, int64_t rows, int64_t inner, float* to) {
  kernels().pack_rows({element_of(m.dtype), m.data, m.strides[0], m.strides[1]}, rows, inner, to);
}

Lines packed_lines(const float* data, int64_t inner) { return {data, 1, kernels().rows, kernels().rows * inner}; }

// Some rows of some entries, packed: for each entry and each sum's part of the inner axis one panel after the other. Where b has few
// columns they are read where they lie, if they lie in lines.
class Rows {
 public:
  Rows(const Product& p, const Cut& cut)
      : p_(p), cut_(cut), in_place_(lies_in_lines(p.a) && p.n <= 2 * kBlockColumns),
        scratch_(in_place_ ? 0 : cut.entries * cut.rows * p.step * sizeof(float)), data_(scratch_.as<float>()) {}

  void load(int64_t entry, int64_t entries, int64_t row, int64_t rows) {
    if (in_place_) return;
    entry_ = entry, row_ = row, padded_ = padded(rows, kMostRows);
    const int64_t groups = parts(rows, kPackRows);
    parallel_for(entries * groups, [&](int64_t i) {
      const int64_t of = entry + i / groups, first = row + i % groups * kPackRows;
      const Matrix a = p_.a_of(of).from(0, first);
      for (int64_t k = 0; k < p_.inner(of); k += cut_.inner) {
        pack_rows(a.from(1, k), std::min(kPackRows, row + rows - first), inner(of, k), panel(of, k, first));
      }
    });
  }

  // Those from `row` on of an entry, of the part that begins at k.
  Lines from(int64_t entry, int64_t k, int64_t row) const {
    if (!in_place_) return packed_lines(panel(entry, k, row), inner(entry, k));
    const Matrix a = p_.a_of(entry).from(0, row).from(1, k);
    return lines(static_cast<const float*>(a.data), a.strides[0]);
  }

 private:
  int64_t inner(int64_t entry, int64_t k) const { return std::min(cut_.inner, p_.inner(entry) - k); }

  float* panel(int64_t entry, int64_t k, int64_t row) const {
    return data_ + ((entry - entry_) * p_.step + k) * padded_ + (row - row_) * inner(entry, k);
  }

  const Product& p_;
  const Cut& cut_;
  const bool in_place_;
  int64_t entry_ = 0, row_ = 0, padded_ = 0;
  const Scratch scratch_;
  float* const data_;
};

// The sums of a block, with memory for kInner rows of its columns.
void multiply_block(const Product& p, const Cut& cut, const Rows& a, const Block& block, float* columns, float* sums) {
  const Matrix b = p.b_of(block.entry).from(1, block.column);
  const int64_t length = p.inner(block.entry);
  for (int64_t k = 0; k < length; k += cut.inner) {
    const int64_t inner = std::min(cut.inner, length - k);
    pack_columns(b.from(0, k), block.columns, inner, columns);
    multiply(a.from(block.entry, k, block.row), block.rows, columns, inner, block.columns, sums, block.stride, k == 0);
  }
}

void multiply_entries(const Product& p, const Finish& finish) {
  const Cut cut(p);
  Rows a(p, cut);
  const int64_t column_parts = parts(p.n, kBlockColumns);
  for (int64_t entry = 0; entry < p.entries(); entry += cut.entries) {
    const int64_t entries = std::min(cut.entries, p.entries() - entry);
    for (int64_t row = 0; row < p.m; row += cut.rows) {
      const int64_t rows = std::min(cut.rows, p.m - row), row_parts = parts(rows, cut.task_rows);
      a.load(entry, entries, row, rows);
      parallel_for(entries * row_parts * column_parts, [&](int64_t i) {
        const int64_t first = i / column_parts % row_parts * cut.task_rows, column = i % column_parts * kBlockColumns;
        Block block{entry + i / column_parts / row_parts, row + first, std::min(cut.task_rows, rows - first),
                    column, std::min(kBlockColumns, p.n - column), nullptr, kBlockColumns};
        const Scratch scratch((cut.inner + padded(block.rows, kMostRows)) * kBlockColumns * sizeof(float));
        float *columns = scratch.as<float>(), *sums = columns + cut.inner * kBlockColumns;
        multiply_block(p, cut, a, block, columns, sums);
        block.sums = sums;
        finish(block);
      });
    }
  }
}

// Of sums that are cut: the parts first, then their sums.
void multiply_parts(const Product& p, const Finish& finish) {
  const Scratch scratch(p.entries() * p.m * p.n * sizeof(float));
  float* const sums = scratch.as<float>();
  const auto at = [&](int64_t entry, int64_t row) { return sums + (entry * p.m + row) * p.n; };
  multiply_entries(p, [&](const Block& block) {
    for (int64_t r = 0; r < block.rows; ++r) {
      std::copy_n(block.sums + r * block.stride, block.columns, at(block.entry, block.row + r) + block.column);
    }
  });
  const int64_t groups = parts(p.m, kPackRows);
  parallel_for(size_of(p.batch) * groups, [&](int64_t i) {
    const int64_t entry = i / groups, first = entry * p.parts_of_sum, row = i % groups * kPackRows;
    const int64_t rows = std::min(kPackRows, p.m - row);
    float* const total = at(first, row);
    for (int64_t part = 1; part < p.parts_of_sum; ++part) {
      const float* const own = at(first + part, row);
      for (int64_t j = 0; j < rows * p.n; ++j) total[j] += own[j];
    }
    finish({entry, row, rows, 0, p.n, total, p.n});
  });
}

}  // namespace

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

Matrix Matrix::transposed() const {
  Matrix other = *this;
  std::swap(other.strides.end()[-1], other.strides.end()[-2]);
  return other;
}

Matrix Matrix::from(size_t axis, int64_t i) const {
  return {static_cast<char*>(data) + i * strides[axis] * ffi::ByteWidth(dtype), dtype, strides};
}

Matrix Matrix::entry(const Shape& batch, int64_t i) const {
  Matrix one = *this;
  for (size_t axis = batch.size(); axis-- > 0; i /= batch[axis]) one = one.from(axis, i % batch[axis]);
  one.strides.erase(one.strides.begin(), one.strides.begin() + batch.size());
  return one;
}

bool lies_in_lines(const Matrix& m) { return m.dtype == DType::F32 && m.strides.back() == 1; }

Lines lines_of(const Matrix& m, int64_t rows, int64_t inner, float* memory) {
  if (lies_in_lines(m)) return lines(static_cast<const float*>(m.data), m.strides[0]);
  pack_rows(m, rows, inner, memory);
  return packed_lines(memory, inner);
}

void pack_columns(const Matrix& m, int64_t columns, int64_t inner, float* to) {
  kernels().pack_columns({element_of(m.dtype), m.data, m.strides[1], m.strides[0]}, columns, inner, to);
}

void multiply(const Lines& a, int64_t rows, const float* panels, int64_t inner, int64_t columns, float* sums, int64_t stride,
              bool first) {
  static constexpr int64_t kLine = 0;
  const int64_t tile = kernels().rows;
  for (int64_t begin = 0; begin < rows; begin += kBlockRows) {
    const int64_t end = std::min(rows, begin + kBlockRows);
    for (int64_t c = 0, together; c < columns; c += together) {
      together = columns - c > kernels().columns - kColumns / 2 ? kernels().columns : kColumns;
      const int64_t wanted = std::min(together, columns - c);
      Panels packed{a.from(begin).data, panels + c * inner, &kLine, 1, inner, a.step, kColumns, a.row, wanted, kColumns * inner};
      for (int64_t r = begin; r < end; r += tile, packed.a += a.tile) {
        kernels().outer_products(packed, std::min(tile, end - r), sums + r * stride + c, stride, first);
      }
    }
  }
}

void multiply(const Shape& batch, int64_t m, int64_t k, int64_t n, const Matrix& a, const Matrix& b, const Finish& finish) {
  const Product p{batch, m, k, n, a, b};
  p.parts_of_sum == 1 ? multiply_entries(p, finish) : multiply_parts(p, finish);
}

}  // namespace jaxfuse::product
