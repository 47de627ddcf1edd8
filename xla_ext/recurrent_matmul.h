// Products of few rows with a matrix that is used again and again: its columns are packed once, kLanes of them together,
// so that every use reads memory in order.
#pragma once

#include "simd_math.h"

namespace jaxfuse::recurrent {
namespace {

#if defined(__AVX512F__) || defined(JAXFUSE_EMULATE_AVX512)
constexpr int kMaxRows = 8, kAccumulators = 24;
#elif defined(__AVX2__)
constexpr int kMaxRows = 4, kAccumulators = 12;
#else
constexpr int kMaxRows = 4, kAccumulators = 4;
#endif

constexpr int64_t kInnerBlock = 512;  // rows of packed columns that stay in the L2 cache while all rows of x are multiplied with them
constexpr int64_t kLongestSum = 256;  // products in one sum; more of them would err more than XLA's

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// f(Whole or First) for the lanes of `n` values from `begin` on.
template <class F>
void with_lanes(int64_t begin, int64_t n, F f) {
  begin + kLanes <= n ? f(Whole{}) : f(First{n - begin});
}

// Vector v of row k is at data + k·row + v·vector.
template <class W>
struct Columns {
  const W* data;
  int64_t row, vector;

  const W* at(int64_t k, int v) const { return data + k * row + v * vector; }
};

// kLanes columns of a matrix, packed.
template <class W>
Columns<W> packed(const W* data, int64_t inner) {
  return {data, kLanes, inner * kLanes};
}

// Packs columns [begin, begin + n), n <= kLanes, of rows [first, end) of a row-major matrix, zeros after them; row 0 is at `to`.
template <class W>
void pack(const W* matrix, int64_t first, int64_t end, int64_t width, int64_t begin, int64_t n, W* to) {
  with_lanes(begin, begin + n, [&](auto lanes) {
    for (int64_t k = first; k < end; ++k) store(to + k * kLanes, load(matrix + k * width + begin, lanes));
  });
}

// Packs rows [begin, begin + n) of a row-major matrix as the columns of its transpose, of which `inner` from `first` on.
template <class W>
void pack_transposed(const W* matrix, int64_t width, int64_t first, int64_t inner, int64_t begin, int64_t n, W* to) {
  constexpr int64_t kBlock = 64;
  for (int64_t block = 0; block < inner; block += kBlock) {
    const int64_t end = smaller(block + kBlock, inner);
    for (int64_t i = 0; i < kLanes; ++i) {
      const W* row = matrix + (begin + i) * width + first;
      for (int64_t k = block; k < end; ++k) to[k * kLanes + i] = i < n ? row[k] : W{};
    }
  }
}

// out (R, V vectors) += x (R, inner) · columns
template <int V, int R, class W>
void add_tile(const float* x, int64_t x_row, int64_t inner, Columns<W> columns, float* out, int64_t out_row) {
  for (int64_t begin = 0; begin < inner; begin += kLongestSum) {
    const int64_t end = smaller(begin + kLongestSum, inner);
    Floats sum[R][V] = {};
    for (int64_t k = begin; k < end; ++k) {
      Floats w[V];
      for (int v = 0; v < V; ++v) w[v] = load(columns.at(k, v));
      for (int r = 0; r < R; ++r) {
        const Floats factor = broadcast(x[r * x_row + k]);
        for (int v = 0; v < V; ++v) sum[r][v] = multiply_add(factor, w[v], sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) {
        float* to = out + r * out_row + v * kLanes;
        store(to, load(to) + sum[r][v]);
      }
    }
  }
}

template <int V, int R, class W>
void add_tiles(int64_t rows, const float* x, int64_t x_row, int64_t inner, Columns<W> columns, float* out, int64_t out_row) {
  if (rows == R) return add_tile<V, R>(x, x_row, inner, columns, out, out_row);
  if constexpr (R > 1) add_tiles<V, R - 1>(rows, x, x_row, inner, columns, out, out_row);
}

// out (rows, vectors) += x (rows, inner) · columns; `out_row` floats from one row of out to the next.
template <class W>
void add_product(const float* x, int64_t x_row, int64_t rows, int64_t inner, Columns<W> columns, int vectors, float* out,
                 int64_t out_row) {
  const int64_t most_rows = parts(rows, parts(rows, kMaxRows));
  const int64_t fit = smaller(kAccumulators / most_rows, 4), at_once = parts(vectors, parts(vectors, fit));
  for (int64_t k = 0; k < inner; k += kInnerBlock) {
    const int64_t block = smaller(kInnerBlock, inner - k);
    for (int64_t v = 0; v < vectors; v += at_once) {
      const Columns<W> some{columns.at(k, int(v)), columns.row, columns.vector};
      for (int64_t r = 0; r < rows; r += most_rows) {
        const int64_t count = smaller(most_rows, rows - r);
        const float* from = x + r * x_row + k;
        float* to = out + r * out_row + v * kLanes;
        switch (smaller(at_once, vectors - v)) {
          case 4: add_tiles<4, kMaxRows < 6 ? kMaxRows : 6>(count, from, x_row, block, some, to, out_row); break;
          case 3: add_tiles<3, kMaxRows>(count, from, x_row, block, some, to, out_row); break;
          case 2: add_tiles<2, kMaxRows>(count, from, x_row, block, some, to, out_row); break;
          default: add_tiles<1, kMaxRows>(count, from, x_row, block, some, to, out_row);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxfuse::recurrent
