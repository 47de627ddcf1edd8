// Max pooling of (batch, 1 to 3 spatial dimensions, channels) as two FFI targets:
//   jaxfuse_max_pool_fwd   x      -> y
//   jaxfuse_max_pool_bwd   x, dy  -> dx
// This file checks the arguments and puts blocks of rows together; the arithmetic is in max_pool_loops.h.
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <vector>

#include "handler.h"
#include "max_pool_kernels.h"
#include "parallel.h"
#include "simd_level.h"

namespace jaxfuse::max_pool {
namespace {

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

// ---- arguments

Tensor input(const Call& call) {
  const Tensor x = call.operand(0, "x");
  call.expect_dtype(x, {DType::F32, DType::BF16});
  if (x.shape.size() < 3 || x.shape.size() > 5) {
    call.refuse("x has shape ", to_string(x.shape), ", expected a batch, 1 to 3 spatial dimensions and channels");
  }
  return x;
}

// One number in [lowest, 2³¹) for each spatial dimension.
Shape spatial_attr(const Call& call, const char* name, size_t dimensions, int64_t lowest) {
  const Shape values = call.int_array(name);
  const auto fits = [&](int64_t v) { return v >= lowest && v <= std::numeric_limits<int32_t>::max(); };
  if (values.size() != dimensions || !std::all_of(values.begin(), values.end(), fits)) {
    call.refuse("attribute ", name, " is ", to_string(values), ", expected ", dimensions,
                " numbers, one for each spatial dimension, from ", lowest, " to 2^31 - 1");
  }
  return values;
}

struct Geometry {
  std::array<Axis, 3> axes;  // those that x lacks are of extent 1, behind the others
  Shape y_shape;

  Geometry(const Call& call, const Tensor& x) : y_shape(x.shape) {
    const size_t dimensions = x.shape.size() - 2;
    const Shape window = spatial_attr(call, "window_dimensions", dimensions, 1);
    const Shape stride = spatial_attr(call, "window_strides", dimensions, 1);
    const Shape low = spatial_attr(call, "padding_low", dimensions, 0);
    const Shape high = spatial_attr(call, "padding_high", dimensions, 0);
    axes.fill({1, 1, 1, 1, 0, nullptr});
    int64_t positions = 1;
    for (size_t d = 0; d < dimensions; ++d) {
      const int64_t in = x.shape[d + 1], room = in + low[d] + high[d] - window[d];
      axes[d] = {in, room < 0 ? 0 : room / stride[d] + 1, window[d], stride[d], low[d], nullptr};
      y_shape[d + 1] = axes[d].out;
      if (positions > std::numeric_limits<int32_t>::max() / window[d]) {
        call.refuse("attribute window_dimensions is ", to_string(window), ", more than 2^31 - 1 positions");
      }
      positions *= window[d];
    }
  }

  Args args(const Tensor& x, const void* dy, void* result) const {
    return {x.dtype == DType::BF16, x.shape.back(), {axes[0], axes[1], axes[2]}, x.data, dy, result};
  }
};

Tensor checked(const Call& call, const Tensor& t, DType dtype, const Shape& shape) {
  call.expect_dtype(t, {dtype});
  call.expect_shape(t, shape);
  return t;
}

// ---- blocks

// The rows of every item of the batch in blocks, item by item.
struct Blocks {
  int64_t items, rows, block_rows;

  int64_t per_item() const { return (rows + block_rows - 1) / block_rows; }
  int64_t size() const { return items * per_item(); }
  Block operator[](int64_t i) const {
    const int64_t begin = i % per_item() * block_rows;
    return {i / per_item(), {begin, std::min(begin + block_rows, rows)}};
  }
};

// The windows that cover each input of an axis: those o with o·stride <= i + padding_low < o·stride + window.
std::vector<Range> windows_of(const Axis& axis) {
  std::vector<Range> ranges(axis.in);
  for (int64_t i = 0; i < axis.in; ++i) {
    const int64_t at = i + axis.padding_low;
    const int64_t begin = at < axis.window ? 0 : (at - axis.window) / axis.stride + 1;
    const int64_t end = std::min(at / axis.stride + 1, axis.out);
    ranges[i] = {begin, std::max(begin, end)};
  }
  return ranges;
}

// ---- targets

void fwd(const Call& call) {
  call.expect_counts(1, 1);
  const Tensor x = input(call);
  const Geometry geometry(call, x);
  const Tensor y = checked(call, call.result(0, "y"), x.dtype, geometry.y_shape);
  const Kernels& run = kernels();
  if (y.size() == 0) return;
  const Args args = geometry.args(x, nullptr, y.data);
  constexpr int64_t kBlockElements = 16 << 10;
  const int64_t per_row = y.size() / (y.shape[0] * y.shape[1]);
  const Blocks blocks{y.shape[0], y.shape[1], std::max<int64_t>(kBlockElements / per_row, 1)};
  parallel_for(blocks.size(), [&](int64_t i) {
    const DenormalsFlushed mode;
    run.forward(args, blocks[i]);
  });
}

void bwd(const Call& call) {
  call.expect_counts(2, 1);
  const Tensor x = input(call);
  Geometry geometry(call, x);
  const Tensor dy = checked(call, call.operand(1, "dy"), x.dtype, geometry.y_shape);
  const Tensor dx = checked(call, call.result(0, "dx"), x.dtype, x.shape);
  const Kernels& run = kernels();
  if (dx.size() == 0) return;
  std::array<std::vector<Range>, 3> ranges;
  for (size_t d = 0; d < 3; ++d) {
    ranges[d] = windows_of(geometry.axes[d]);
    geometry.axes[d].windows_of = ranges[d].data();
  }
  const Args args = geometry.args(x, dy.data, dx.data);
  // A block finds the winners of every window that touches its rows: those at its edges are found twice, so it should be
  // large; but the winners should stay in the L2 cache.
  constexpr int64_t kWinners = 32 << 10;
  const Axis& axis = geometry.axes[0];
  const int64_t per_row = geometry.axes[1].out * geometry.axes[2].out * winners_per_window(args.channels);
  const int64_t rows = std::clamp<int64_t>(kWinners / std::max<int64_t>(per_row, 1), 1, axis.in) * axis.stride;
  const Blocks blocks{x.shape[0], axis.in, std::min(rows, axis.in)};
  const int64_t most_rows = std::min((blocks.block_rows + axis.window - 2) / axis.stride + 1, axis.out);
  const int64_t workers = std::min<int64_t>(max_threads(), blocks.size());
  std::vector<int32_t> winners(workers * most_rows * per_row);
  std::atomic<int64_t> next{0};
  parallel_for(workers, [&](int64_t worker) {
    const DenormalsFlushed mode;
    for (int64_t i = next++; i < blocks.size(); i = next++) {
      run.backward(args, blocks[i], winners.data() + worker * most_rows * per_row);
    }
  });
}

JAXFUSE_HANDLER(jaxfuse_max_pool_fwd, fwd);
JAXFUSE_HANDLER(jaxfuse_max_pool_bwd, bwd);

}  // namespace
}  // namespace jaxfuse::max_pool
