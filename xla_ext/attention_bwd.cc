// jaxfuse_attention_bwd: the gradients of attention, the softmax computed again tile by tile from what the forward pass saved of
// each row (Dao et al. 2022):
//
//     p = e^(s - largest)·inverse,  dv = (p·f)ᵀ·dy,  ds = p·(f·(dy·vᵀ) - Σ dy·y),  dq = scale·ds·k,  dk = scale·dsᵀ·q,  f the factor
#include <algorithm>

#include "attention.h"
#include "scratch.h"

namespace jaxfuse::attention {
namespace {

// Of a tile: what is packed of its rows and of its keys lies in the second-level cache with both of its matrices.
constexpr int64_t kTileRows = 8 * kMostRows, kTileKeys = 128, kTasks = 16;

struct Backward {
  Problem problem;
  Matrix y, dy, dq, dk, dv;
  const float *largest, *inverse;
  float* dscores = nullptr;

  explicit Backward(const Call& call) : problem(call) {
    const Problem& p = problem;
    const size_t first = p.operands();
    call.expect_counts(first + 4, call.results() == 4 ? 4 : 3);
    y = of_y(call, call.operand(first, "y"));
    dy = of_y(call, call.operand(first + 3, "dy"));
    largest = statistic(call, first + 1, "largest");
    inverse = statistic(call, first + 2, "inverse");
    call.expect_dtype(call.operand(first + 3, "dy"), {y.dtype});
    dq = gradient(call, 0, "dq", "dq_strides", {p.rows, p.inner});
    dk = gradient(call, 1, "dk", "dk_strides", {p.keys, p.inner});
    dv = gradient(call, 2, "dv", "dv_strides", {p.keys, p.columns});
    if (call.results() == 4) {
      Shape shape = p.batch;
      shape.insert(shape.end(), {p.rows, p.keys});
      dscores = call.checked(call.result(3, "dscores"), DType::F32, shape).as<float>();
    }
  }

 private:
  Matrix matrix(const Call& call, const Tensor& t, const char* strides, const Shape& extents) const {
    call.expect_dtype(t, {DType::F32, problem.q.dtype});
    return problem.written(call, t, strides, extents);
  }
  Matrix of_y(const Call& call, const Tensor& t) const { return matrix(call, t, "y_strides", {problem.rows, problem.columns}); }
  Matrix gradient(const Call& call, size_t i, const char* name, const char* strides, const Shape& extents) const {
    return matrix(call, call.result(i, name), strides, extents);
  }
  const float* statistic(const Call& call, size_t i, const char* name) const {
    Shape shape = problem.batch;
    shape.push_back(problem.rows);
    return call.checked(call.operand(i, name), DType::F32, shape).as<float>();
  }
};

// Memory for a task, in floats: what is packed of a tile's keys and of its rows, its matrices, and sums of gradients.
struct Memory {
  int64_t rows, keys, key_stride, inner_stride, column_stride;
  Scratch scratch;
  float* next = scratch.as<float>();
  float *k_rows, *v_rows, *k_columns, *q_rows, *dy_rows, *q_columns, *dy_columns, *p, *dp, *delta, *dk, *dv;

  explicit Memory(const Problem& of)
      : rows(std::min(padded(of.rows, kMostRows), kTileRows)), keys(std::min(of.keys, kTileKeys)), key_stride(whole_panels(keys)),
        inner_stride(whole_panels(of.inner)), column_stride(whole_panels(of.columns)),
        scratch(sizeof(float) * ((key_stride + rows) * (of.inner + of.columns) + (2 * keys + rows) * inner_stride +
                                 (keys + rows) * column_stride + 2 * rows * key_stride + rows)),
        k_rows(take(key_stride * of.inner)), v_rows(take(key_stride * of.columns)), k_columns(take(keys * inner_stride)),
        q_rows(take(rows * of.inner)), dy_rows(take(rows * of.columns)), q_columns(take(rows * inner_stride)),
        dy_columns(take(rows * column_stride)), p(take(rows * key_stride)), dp(take(rows * key_stride)), delta(take(rows)),
        dk(take(keys * inner_stride)), dv(take(keys * column_stride)) {}

 private:
  float* take(int64_t floats) { return (next += floats) - floats; }
};

void store(const float* sums, int64_t stride, int64_t rows, int64_t columns, const Matrix& to) {
  kernels().write(sums, stride, rows, columns, element_of(to.dtype), to.data, to.strides[0]);
}

// Of the gradients of a batch entry what its keys [begin, end) give: dk and dv of these, and their part of dq in f32.
void differentiate(const Backward& b, int64_t entry, int64_t begin, int64_t end, float* dq) {
  const Problem& p = b.problem;
  const Memory m(p);
  const auto of_entry = [&](const Matrix& matrix, int64_t first) { return matrix.entry(p.batch, entry).from(0, first); };
  for (int64_t key = begin; key < end; key += m.keys) {
    const int64_t keys = std::min(m.keys, end - key);
    const Matrix k = of_entry(p.k, key), v = of_entry(p.v, key);
    pack_columns(k.transposed(), keys, p.inner, m.k_rows);
    pack_columns(v.transposed(), keys, p.columns, m.v_rows);
    pack_columns(k, p.inner, keys, m.k_columns);
    for (int64_t row = 0; row < p.rows; row += m.rows) {
      const int64_t rows = std::min(m.rows, p.rows - row), at = entry * p.rows + row;
      const Matrix q = of_entry(p.q, row), y = of_entry(b.y, row), dy = of_entry(b.dy, row);
      pack_columns(q, p.inner, rows, m.q_columns);
      pack_columns(dy, p.columns, rows, m.dy_columns);
      multiply(lines_of(q, rows, p.inner, m.q_rows), rows, m.k_rows, p.inner, whole_panels(keys), m.p, m.key_stride, true);
      multiply(lines_of(dy, rows, p.columns, m.dy_rows), rows, m.v_rows, p.columns, whole_panels(keys), m.dp, m.key_stride, true);
      if (keys < p.keys) {
        kernels().row_products(element_of(y.dtype), y.data, y.strides[0], dy.data, dy.strides[0], rows, p.columns, m.delta);
      }
      float* const dscores = b.dscores ? b.dscores + at * p.keys + key : nullptr;
      kernels().gradient(p.scores(entry, row, rows, key, keys, m.p, m.key_stride),
                         {b.largest + at, b.inverse + at, keys < p.keys ? m.delta : nullptr, m.dp, dscores, p.keys});
      const auto transposed = [&](const float* tile) { return Lines{tile, 1, m.key_stride, product::kernels().rows}; };
      multiply(transposed(m.p), keys, m.dy_columns, rows, m.column_stride, m.dv, m.column_stride, row == 0);
      multiply(transposed(m.dp), keys, m.q_columns, rows, m.inner_stride, m.dk, m.inner_stride, row == 0);
      multiply(product::lines(m.dp, m.key_stride), rows, m.k_columns, keys, m.inner_stride, dq + row * m.inner_stride, m.inner_stride,
               key == begin);
    }
    store(m.dk, m.inner_stride, keys, p.inner, of_entry(b.dk, key));
    store(m.dv, m.column_stride, keys, p.columns, of_entry(b.dv, key));
  }
}

// Of few batch entries the keys are cut, and the parts of dq added afterwards.
void backward(const Call& call) {
  const Backward b(call);
  const Problem& p = b.problem;
  const int64_t wanted = std::min(parts(kTasks, p.entries()), parts(p.keys, kTileKeys));
  const int64_t step = parts(p.keys, wanted), key_parts = parts(p.keys, step);
  const int64_t stride = whole_panels(p.inner), floats = p.rows * stride;
  const Scratch scratch(p.entries() * key_parts * floats * sizeof(float));
  float* const sums = scratch.as<float>();
  for_tasks(p, p.entries() * key_parts, [&](int64_t task) {
    const int64_t begin = task % key_parts * step;
    differentiate(b, task / key_parts, begin, std::min(p.keys, begin + step), sums + task * floats);
  });
  const int64_t chunk = std::min(p.rows, kTileRows), chunks = parts(p.rows, chunk);
  for_tasks(p, p.entries() * chunks, [&](int64_t task) {
    const int64_t entry = task / chunks, row = task % chunks * chunk, rows = std::min(chunk, p.rows - row);
    float* const total = sums + entry * key_parts * floats + row * stride;
    for (int64_t part = 1; part < key_parts; ++part) {
      for (int64_t i = 0; i < rows * stride; ++i) total[i] += total[part * floats + i];
    }
    store(total, stride, rows, p.inner, b.dq.entry(p.batch, entry).from(0, row));
  });
}

JAXFUSE_HANDLER(jaxfuse_attention_bwd, backward);

}  // namespace
}  // namespace jaxfuse::attention
