// Layer, RMS, group and instance norm on row-major tensors of any shape, seen as (outer, spatial, groups, length): the last three
// are the attribute `inner`. Two FFI targets:
//   jaxfuse_norm_fwd  x, gamma, beta, [residual]                  -> y, [sum], [mean, rstd]
//   jaxfuse_norm_bwd  dy, s, gamma, beta, mean, rstd, [ds]        -> dx, [dgamma, dbeta]
// s = x + residual; y = activation((s - mean)·rstd·gamma + beta) with mean and rstd of each (outer, group). What is in
// brackets is there if an attribute says so. Every full-size tensor is read once from memory where a batch entry fits a cache.
// This file checks the arguments and runs tasks; the arithmetic is in norm_rows_loops.h and norm_columns_loops.h.
#include "norm_kernels.h"

#include <algorithm>
#include <vector>

#include "activation_attr.h"
#include "handler.h"
#include "cut.h"
#include "parallel.h"
#include "partial_sums.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::norm {
namespace {

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

// ---- arguments

struct Arguments {
  const Call& call;
  Tensor x;
  Extent extent;

  Arguments(const Call& call, size_t i, const char* name) : call(call), x(call.operand(i, name)) {
    call.expect_dtype(x, {DType::F32, DType::BF16, DType::F16});
    const Shape inner = call.int_array("inner");
    if (inner.size() != 3 || *std::min_element(inner.begin(), inner.end()) < 1) {
      call.refuse("attribute inner is ", to_string(inner), ", expected 3 positive numbers: spatial, groups, length");
    }
    if (x.size() == 0 || x.size() % size_of(inner) != 0) {
      call.refuse(name, " has shape ", to_string(x.shape), ", expected a multiple of ", size_of(inner), " elements, as inner has");
    }
    extent = {x.size() / size_of(inner), inner[0], inner[1], inner[2]};
  }

  Tensor like(const Tensor& t) const { return call.checked(t, x.dtype, x.shape); }
  float* channels(const Tensor& t) const { return call.checked(t, DType::F32, {extent.groups, extent.length}).as<float>(); }
  float* statistic(const Tensor& t) const { return call.checked(t, DType::F32, {extent.outer, extent.groups}).as<float>(); }

  // gamma and beta are operands `gamma` and the next.
  Options options(size_t gamma) const {
    const float epsilon = call.attr<float>("epsilon");
    if (!(epsilon >= 0)) call.refuse("attribute epsilon is ", epsilon, ", expected 0 or more");
    return {element_of(x.dtype),
            extent,
            call.attr<bool>("centered"),
            call.attr<bool>("epsilon_outside"),
            epsilon,
            activation_attr(call),
            parameters_attr(call),
            channels(call.operand(gamma, "gamma")),
            channels(call.operand(gamma + 1, "beta"))};
  }

  // Whether an output should be stored past the caches, as batch_norm_tiles.h says, and can be: its vectors must be aligned.
  bool streams(const void* output) const {
    constexpr int64_t kLargerThanCaches = 32 << 20;
    const int64_t row = extent.spatial == 1 ? extent.length : extent.channels();
    return int64_t(x.bytes()) > kLargerThanCaches && reinterpret_cast<uintptr_t>(output) % 64 == 0 && row % kWidestVector == 0 &&
           (extent.spatial == 1 || groups_of_task() * extent.length % kWidestVector == 0);
  }

  // ---- tasks; what they cover depends on the shape alone, so that sums come out bit for bit the same in every run

  int64_t rows() const { return extent.outer * extent.groups; }
  // Large enough to be worth a thread's while, small enough to go round; few, because each has sums of its own. Whole
  // entries of the batch, so that every task has rows of all groups.
  int64_t rows_of_task() const {
    constexpr int64_t kTasks = 16, kSmallest = 16 << 10, kMostRows = 256;
    const int64_t entries = std::max(extent.outer / kTasks, kSmallest / extent.entry());
    return std::clamp<int64_t>(entries, 1, std::max<int64_t>(kMostRows / extent.groups, 1)) * extent.groups;
  }
  int64_t groups_of_task() const {
    constexpr int64_t kTasks = 4, kNarrowest = 64;
    const int64_t wanted = std::max<int64_t>(kTasks / extent.outer, 1);
    return std::min(extent.groups, std::max(parts(extent.groups, wanted), parts(kNarrowest, extent.length)));
  }
};

class TaskMemory {
 public:
  explicit TaskMemory(const Extent& extent)
      : size_(scratch_for(extent)), memory_(size_ * (sizeof(double) + sizeof(float))) {}
  operator Scratch() const { return {reinterpret_cast<float*>(memory_.as<double>() + size_), memory_.as<double>()}; }

 private:
  const int64_t size_;
  const jaxfuse::Scratch memory_;
};

// f(rows, number of the task) for all rows.
template <class F>
void for_rows(const Arguments& arguments, F f) {
  const int64_t rows = arguments.rows(), step = arguments.rows_of_task();
  parallel_for(parts(rows, step), [&](int64_t task) {
    f(Rows{task * step, std::min((task + 1) * step, rows)}, task);
  });
}

// f(columns, index of the batch entry) for all groups of all entries.
template <class F>
void for_columns(const Arguments& arguments, F f) {
  const Extent& extent = arguments.extent;
  const int64_t step = arguments.groups_of_task(), group_parts = parts(extent.groups, step);
  parallel_for(extent.outer * group_parts, [&](int64_t task) {
    const int64_t first = task % group_parts * step, entry = task / group_parts;
    f(Columns{entry, first, std::min(first + step, extent.groups)}, entry);
  });
}

// ---- targets

void forward(const Call& call) {
  const bool has_residual = call.attr<bool>("has_residual"), wants_sum = call.attr<bool>("wants_sum");
  const bool saving = call.attr<bool>("saving");
  if (wants_sum && !has_residual) call.refuse("attribute wants_sum is true but there is no residual");
  call.expect_counts(3 + has_residual, 1 + wants_sum + 2 * saving);
  const Arguments arguments(call, 0, "x");
  Forward f{arguments.options(1), arguments.x.data, nullptr, nullptr, nullptr, nullptr, nullptr, false};
  if (has_residual) f.residual = arguments.like(call.operand(3, "residual")).data;
  f.y = arguments.like(call.result(0, "y")).data;
  f.stream = arguments.streams(f.y);
  if (wants_sum) {
    f.sum = arguments.like(call.result(1, "sum")).data;
    f.stream &= arguments.streams(f.sum);
  }
  if (saving) {
    f.mean = arguments.statistic(call.result(1 + wants_sum, "mean"));
    f.rstd = arguments.statistic(call.result(2 + wants_sum, "rstd"));
  }
  const Kernels& run = kernels();
  const Extent& extent = arguments.extent;
  if (extent.spatial == 1) {
    for_rows(arguments, [&](Rows rows, int64_t) { run.forward_rows(f, rows, TaskMemory(extent)); });
  } else {
    for_columns(arguments, [&](Columns columns, int64_t) { run.forward_columns(f, columns, TaskMemory(extent)); });
  }
}

// Sums for each channel by task.
class ChannelSums {
 public:
  ChannelSums(int64_t tasks, int64_t channels, bool wanted) : tasks_(tasks), channels_(channels), values_(wanted ? tasks * channels : 0) {}
  float* of(int64_t task) { return values_.empty() ? nullptr : &values_[task * channels_]; }
  void total_into(float* result) const { add_parts(values_.data(), tasks_, channels_, result); }

 private:
  const int64_t tasks_, channels_;
  std::vector<float> values_;
};

void backward(const Call& call) {
  const bool has_ds = call.attr<bool>("has_ds"), wants_parameters = call.attr<bool>("wants_parameters");
  call.expect_counts(6 + has_ds, 1 + 2 * wants_parameters);
  const Arguments arguments(call, 1, "s");
  Backward b{arguments.options(2), nullptr, arguments.x.data, nullptr, nullptr, nullptr, nullptr, false};
  b.dy = arguments.like(call.operand(0, "dy")).data;
  b.mean = arguments.statistic(call.operand(4, "mean"));
  b.rstd = arguments.statistic(call.operand(5, "rstd"));
  if (has_ds) b.ds = arguments.like(call.operand(6, "ds")).data;
  b.dx = arguments.like(call.result(0, "dx")).data;
  b.stream = arguments.streams(b.dx);
  float* dgamma = wants_parameters ? arguments.channels(call.result(1, "dgamma")) : nullptr;
  float* dbeta = wants_parameters ? arguments.channels(call.result(2, "dbeta")) : nullptr;
  const Kernels& run = kernels();
  const Extent& extent = arguments.extent;
  const bool by_rows = extent.spatial == 1;
  const int64_t step = arguments.rows_of_task(), tasks = by_rows ? parts(arguments.rows(), step) : extent.outer;
  ChannelSums gammas(tasks, extent.channels(), wants_parameters), betas(tasks, extent.channels(), wants_parameters);
  if (by_rows) {
    for_rows(arguments, [&](Rows rows, int64_t task) {
      run.backward_rows(b, rows, gammas.of(task), betas.of(task), TaskMemory(extent));
    });
  } else {
    for_columns(arguments, [&](Columns columns, int64_t entry) {
      const int64_t at = columns.begin * extent.length;
      float* of_gamma = wants_parameters ? gammas.of(entry) + at : nullptr;
      float* of_beta = wants_parameters ? betas.of(entry) + at : nullptr;
      run.backward_columns(b, columns, of_gamma, of_beta, TaskMemory(extent));
    });
  }
  if (wants_parameters) gammas.total_into(dgamma), betas.total_into(dbeta);
}

JAXFUSE_HANDLER(jaxfuse_norm_fwd, forward);
JAXFUSE_HANDLER(jaxfuse_norm_bwd, backward);

}  // namespace
}  // namespace jaxfuse::norm
