// jaxfuse_attention_fwd: y = (softmax(scale·q·kᵀ + bias)·factor)·v in one pass, after Dao et al. 2022: of every row only its largest
// score and the sums so far are held while blocks of keys go by, and a tile of scores never leaves the cache.
#include "attention.h"

#include <algorithm>

#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::attention {
namespace {

// Rows of a tile whose scores lie in the first-level cache with the panel of keys that they are multiplied with; rows of a task.
constexpr int64_t kGroupRows = 2 * kMostRows, kTaskRows = 22 * kMostRows, kFewestRows = 4 * kMostRows, kTasks = 16;

// Memory for a task.
struct Memory {
  int64_t keys, key_stride, stride;
  Scratch scratch;
  float *k, *v, *scores, *sums, *q, *largest, *total;

  Memory(const Problem& p, int64_t rows)
      : keys(std::min(p.keys, kBlockKeys)), key_stride(whole_panels(keys)), stride(whole_panels(p.columns)),
        scratch(sizeof(float) * (key_stride * p.inner + keys * stride + kGroupRows * key_stride + rows * stride +
                                 padded(rows, kMostRows) * p.inner + 2 * rows)),
        k(scratch.as<float>()), v(k + key_stride * p.inner), scores(v + keys * stride),
        sums(scores + kGroupRows * key_stride), q(sums + rows * stride), largest(q + padded(rows, kMostRows) * p.inner),
        total(largest + rows) {}
};

void attend(const Forward& f, int64_t entry, int64_t row, int64_t rows) {
  const Problem& p = f.problem;
  const Memory m(p, rows);
  const Matrix k = p.k.entry(p.batch, entry), v = p.v.entry(p.batch, entry);
  const Lines q = lines_of(p.q.entry(p.batch, entry).from(0, row), rows, p.inner, m.q);
  for (int64_t key = 0; key < p.keys; key += m.keys) {
    const int64_t keys = std::min(m.keys, p.keys - key);
    pack_columns(k.from(0, key).transposed(), keys, p.inner, m.k);
    pack_columns(v.from(0, key), p.columns, keys, m.v);
    for (int64_t r = 0; r < rows; r += kGroupRows) {
      const int64_t count = std::min(kGroupRows, rows - r);
      float* const sums = m.sums + r * m.stride;
      multiply(q.from(r), count, m.k, p.inner, whole_panels(keys), m.scores, m.key_stride, true);
      kernels().softmax(p.scores(entry, row + r, count, key, keys, m.scores, m.key_stride),
                        {m.largest + r, m.total + r, sums, p.columns, m.stride}, key == 0);
      multiply(product::lines(m.scores, m.key_stride), count, m.v, keys, m.stride, sums, m.stride, key == 0);
    }
  }
  f.finish({m.largest, m.total, m.sums, p.columns, m.stride}, entry, row, rows);
}

void forward(const Call& call) {
  const Forward f(call);
  const Problem& p = f.problem;
  const bool matrices = takes_matrices(f);
  const int64_t wanted = std::max(parts(p.rows, kTaskRows), std::min(parts(kTasks, p.entries()), p.rows / kFewestRows));
  const int64_t step = padded(parts(p.rows, wanted), kMostRows), row_parts = parts(p.rows, step);
  for_tasks(p, p.entries() * row_parts, [&](int64_t task) {
    const int64_t row = task % row_parts * step;
    (matrices ? attend_by_matrices : attend)(f, task / row_parts, row, std::min(step, p.rows - row));
  });
}

JAXFUSE_HANDLER(jaxfuse_attention_fwd, forward);

}  // namespace

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

Forward::Forward(const Call& call)
    : problem(call), y(call.result(0, "y")), out(problem.written(call, y, "y_strides", {problem.rows, problem.columns})) {
  const bool saving = call.results() == 3;
  call.expect_counts(problem.operands(), saving ? 3 : 1);
  call.expect_dtype(y, {DType::F32, problem.v.dtype});
  Shape shape = problem.batch;
  shape.push_back(problem.rows);
  for (size_t i = 1; saving && i < 3; ++i) {
    const Tensor statistic = call.checked(call.result(i, i == 1 ? "largest" : "inverse"), DType::F32, shape);
    (i == 1 ? largest : inverse) = statistic.as<float>();
  }
}

void Forward::finish(const Softmax& state, int64_t entry, int64_t row, int64_t rows) const {
  const int64_t at = entry * problem.rows + row;
  const Matrix to = out.entry(problem.batch, entry).from(0, row);
  kernels().finish(state, rows, element_of(to.dtype), to.data, to.strides[0], largest ? largest + at : nullptr,
                   inverse ? inverse + at : nullptr);
}

Problem::Problem(const Call& call)
    : batch(call.int_array("batch")), rows(call.attr<int64_t>("rows")), keys(call.attr<int64_t>("keys")),
      inner(call.attr<int64_t>("inner")), columns(call.attr<int64_t>("columns")), scale(call.attr<float>("scale")),
      fill(call.attr<float>("fill")) {
  const auto unknown = std::find(batch.begin(), batch.end(), -1);
  if (unknown != batch.end()) {
    const size_t d = unknown - batch.begin();
    *unknown = std::max({batch_size(call, d, call.operand(0, "q"), "q_strides", {rows, inner}),
                         batch_size(call, d, call.operand(1, "k"), "k_strides", {keys, inner}),
                         batch_size(call, d, call.operand(2, "v"), "v_strides", {keys, columns})});
  }
  Shape all = batch;
  all.insert(all.end(), {rows, keys, inner, columns});
  if (*std::min_element(all.begin(), all.end()) < 1) {
    call.refuse("sizes are ", to_string(all), ", expected positive numbers: batch, rows, keys, inner, columns");
  }
  const auto operand = [&](size_t i, const char* name, const char* strides, const Shape& extents) {
    const Tensor t = call.operand(i, name);
    call.expect_dtype(t, {DType::F32, DType::BF16, DType::F16});
    return matrix(call, t, strides, extents);
  };
  q = operand(0, "q", "q_strides", {rows, inner});
  k = operand(1, "k", "k_strides", {keys, inner});
  v = operand(2, "v", "v_strides", {keys, columns});
  const bool has_bias = call.attr<bool>("has_bias"), has_mask = call.attr<bool>("has_mask");
  if (has_bias) bias = operand(3, "bias", "bias_strides", {rows, keys});
  if (has_mask) {
    const Tensor t = call.operand(3 + has_bias, "mask");
    call.expect_dtype(t, {DType::PRED});
    mask = matrix(call, t, "mask_strides", {rows, keys});
  }
  if (call.attr<bool>("has_factor")) {
    factor = operand(3 + has_bias + has_mask, "factor", "factor_strides", {rows, keys});
    call.expect_dtype(call.operand(3 + has_bias + has_mask, "factor"), {DType::F32});
  }
  for (const auto& m : {bias, mask, factor}) {
    if (m && m->strides.back() != 1) call.refuse("bias, mask or factor has keys ", m->strides.back(), " elements apart, expected 1");
  }
}

int64_t Problem::batch_size(const Call& call, size_t d, const Tensor& t, const char* strides, const Shape& extents) const {
  const Shape own = call.int_array(strides);
  Shape shape = batch;
  shape.insert(shape.end(), extents.begin(), extents.end());
  if (own.size() != shape.size() || own[d] == 0) return -1;
  int64_t others = 1;
  for (size_t e = 0; e < shape.size(); ++e) {
    if (e != d && own[e] != 0 && (shape[e] < 1 || __builtin_mul_overflow(others, shape[e], &others))) return -1;
  }
  return t.size() / others;
}

Matrix Problem::matrix(const Call& call, const Tensor& t, const char* strides, const Shape& extents) const {
  Matrix m{t.data, t.dtype, call.int_array(strides)};
  Shape shape = batch;
  shape.insert(shape.end(), extents.begin(), extents.end());
  if (m.strides.size() != shape.size()) call.refuse(strides, " are ", m.strides.size(), ", expected ", shape.size());
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (m.strides[d] < 0 || !add_product(shape[d] - 1, m.strides[d], last)) {
      call.refuse(strides, " are ", to_string(m.strides), ", expected none below 0, and within the buffer");
    }
  }
  if (last != t.size() - 1) {
    call.refuse(t.name, " has shape ", to_string(t.shape), ", expected the elements of ", to_string(shape), " at ", strides, " ",
                to_string(m.strides));
  }
  return m;
}

Matrix Problem::written(const Call& call, const Tensor& t, const char* strides, const Shape& extents) const {
  const Matrix m = matrix(call, t, strides, extents);
  if (m.strides.back() != 1) call.refuse(t.name, " has columns ", m.strides.back(), " elements apart, expected 1");
  if (t.size() != entries() * size_of(extents)) {
    call.refuse(t.name, " has shape ", to_string(t.shape), ", expected one matrix for each entry of the batch");
  }
  return m;
}

Scores Problem::scores(int64_t entry, int64_t row, int64_t count, int64_t key, int64_t width, float* s, int64_t stride) const {
  Scores scores{s, count, width, stride, scale, fill, Element::f32, nullptr, nullptr, 0, 0, nullptr, 0};
  if (bias) {
    const Matrix m = bias->entry(batch, entry).from(0, row).from(1, key);
    scores.bias_element = element_of(m.dtype), scores.bias = m.data, scores.bias_row = m.strides[0];
  }
  if (mask) {
    const Matrix m = mask->entry(batch, entry).from(0, row).from(1, key);
    scores.mask = static_cast<const uint8_t*>(m.data), scores.mask_row = m.strides[0];
  }
  if (factor) {
    const Matrix m = factor->entry(batch, entry).from(0, row).from(1, key);
    scores.factor = static_cast<const float*>(m.data), scores.factor_row = m.strides[0];
  }
  return scores;
}

}  // namespace jaxfuse::attention
