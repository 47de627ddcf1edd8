// attention.cc's rows by AMX, where all is bf16. What the softmax gives is two numbers of bf16 each, for its products with v: y errs by
// little more than its own rounding.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "contraction.h"
#include "scratch.h"

namespace jaxfuse::attention {
namespace {

using contraction::kLineBytes, contraction::kPanel, contraction::kStepBytes;

constexpr int64_t kElement = 2;

int64_t steps(int64_t elements) { return parts(elements * kElement, kStepBytes); }
int64_t line_bytes(int64_t elements) { return padded(elements * kElement, kLineBytes); }

// A matrix's columns as panels.
class Panels {
 public:
  Panels(int64_t inner, int64_t columns) : data_(parts(columns, kPanel) * steps(inner) * kLineBytes) {}

  // Whether all of it is finite.
  bool pack(const Matrix& m, int64_t inner, int64_t columns) {
    inner_ = inner, columns_ = columns;
    bool finite = true;
    for_groups([&](int64_t n, int64_t count, char* to) {
      const contraction::Columns some{Element::bf16, m.from(1, n).data, m.strides[0], m.strides[1]};
      finite &= contraction::kernels().pack_bf16(some, count, inner, to, layout());
    });
    return finite;
  }

  // sums = rows·columns, or are added to what is there.
  void multiply(const char* const* rows, int64_t count, float* sums, int64_t stride, bool first) const {
    for_groups([&](int64_t n, int64_t columns, const char* panels) {
      const contraction::Tile tile{rows, nullptr, 0, 0, 1, steps(inner_), false, columns, panels, layout(), nullptr, 0, 0};
      contraction::kernels().multiply_pairs(tile, count, sums + n, stride, first);
    });
  }

 private:
  contraction::Layout layout() const { return {kLineBytes, steps(inner_) * kLineBytes}; }

  // f(column, count, panels) for as many columns as a tile meets at once.
  template <class F>
  void for_groups(F f) const {
    const int64_t together = contraction::kernels().columns;
    for (int64_t n = 0; n < columns_; n += together) f(n, std::min(together, columns_ - n), data_.data() + n / kPanel * layout().panel);
  }

  int64_t inner_ = 0, columns_ = 0;
  const Scratch data_;
};

// Rows of bf16, each with zeros up to whole lines of the cache.
class Rows {
 public:
  Rows(int64_t rows, int64_t elements) : stride_(line_bytes(elements) + kLineBytes), data_(rows * stride_) {
    for (int64_t i = 0; i < rows; ++i) at_.push_back(data_.data() + i * stride_);
  }

  const char* const* from(int64_t row) const { return at_.data() + row; }

  void copy(const Matrix& m, int64_t rows, int64_t elements) {
    std::vector<const char*> from;
    for (int64_t i = 0; i < rows; ++i) from.push_back(static_cast<const char*>(m.from(0, i).data));
    const bool odd = elements % 2 != 0;
    const contraction::Tile tile{from.data(), nullptr, rows, 0, 1, steps(elements), odd, 0, nullptr, {}, nullptr, 0, 0};
    contraction::products_of(DType::BF16).copy(tile, rows, data_.data(), stride_);
  }

  // `from` is the sum of both afterwards.
  static void split(const float* from, int64_t stride, int64_t rows, int64_t elements, const Rows& high, const Rows& low) {
    kernels().split(from, stride, rows, elements, high.data_.data(), low.data_.data(), high.stride_ / kElement);
    for (const Rows* part : {&high, &low}) {
      for (int64_t i = 0; i < rows; ++i) std::fill(part->end(i, elements * kElement), part->end(i, line_bytes(elements)), 0);
    }
  }

 private:
  char* end(int64_t row, int64_t bytes) const { return data_.data() + row * stride_ + bytes; }

  const int64_t stride_;
  const Scratch data_;
  std::vector<const char*> at_;
};

}  // namespace

bool takes_matrices(const Forward& f) {
  const Problem& p = f.problem;
  const auto is_bf16 = [](const Matrix& m) { return m.dtype == DType::BF16; };
  const bool all = is_bf16(p.q) && is_bf16(p.k) && is_bf16(p.v) && is_bf16(f.out);
  return contraction::kernels().multiply_pairs && all && p.q.strides.back() == 1;
}

void attend_by_matrices(const Forward& f, int64_t entry, int64_t row, int64_t rows) {
  const Problem& p = f.problem;
  const contraction::Products& products = contraction::products_of(DType::BF16);
  const int64_t block = std::min(p.keys, kBlockKeys), score_stride = padded(block, kPanel), stride = padded(p.columns, kPanel);
  const int64_t memory = rows + products.fewest;  // so many rows are read, and sums written, of the last few
  const Matrix k = p.k.entry(p.batch, entry), v = p.v.entry(p.batch, entry);
  Panels keys(p.inner, block), values(block, p.columns);
  Rows q(memory, p.inner), high(products.rows, block), low(products.rows, block);
  const Scratch scratch((products.rows * score_stride + memory * stride + 2 * rows) * sizeof(float));
  float *const scores = scratch.as<float>(), *const sums = scores + products.rows * score_stride, *const largest = sums + memory * stride;
  const Softmax state{largest, largest + rows, sums, p.columns, stride};
  q.copy(p.q.entry(p.batch, entry).from(0, row), rows, p.inner);
  const contraction::Multiplying multiplying(products);
  for (int64_t key = 0; key < p.keys; key += block) {
    const int64_t count = std::min(block, p.keys - key);
    keys.pack(k.from(0, key).transposed(), p.inner, count);
    const bool finite = values.pack(v.from(0, key), count, p.columns);
    for (int64_t r = 0; r < rows; r += products.rows) {
      const int64_t some = std::min(products.rows, rows - r);
      const Softmax own{state.largest + r, state.total + r, sums + r * stride, p.columns, stride};
      keys.multiply(q.from(r), some, scores, score_stride, true);
      kernels().softmax(p.scores(entry, row + r, some, key, count, scores, score_stride), own, key == 0);
      Rows::split(scores, score_stride, some, count, high, low);
      values.multiply(high.from(0), some, own.sums, stride, key == 0);
      if (finite) values.multiply(low.from(0), some, own.sums, stride, false);  // a low part of 0 would make NaN of an infinity
    }
  }
  f.finish(state, entry, row, rows);
}

}  // namespace jaxfuse::attention
