// Max pooling of (batch, 1 to 3 spatial dimensions, channels) as two FFI targets:
//   jaxfuse_max_pool_fwd   x            -> y, [winners]
//   jaxfuse_max_pool_bwd   winners, dy  -> dx
// This file checks the arguments and puts blocks of rows together; the arithmetic is in max_pool_loops.h.
#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "cut.h"
#include "handler.h"
#include "max_pool_kernels.h"
#include "parallel.h"
#include "simd_level.h"

namespace jaxfuse::max_pool {
namespace {

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

// ---- arguments

void check_image(const Call& call, const Tensor& x) {
  call.expect_dtype(x, {DType::F32, DType::BF16, DType::F16});
  if (x.shape.size() < 3 || x.shape.size() > 5) {
    call.refuse(x.name, " has shape ", to_string(x.shape), ", expected a batch, 1 to 3 spatial dimensions and channels");
  }
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
  int64_t positions = 1;  // of a window

  Geometry(const Call& call, const Tensor& x) : y_shape(x.shape) {
    const size_t dimensions = x.shape.size() - 2;
    const Shape window = spatial_attr(call, "window_dimensions", dimensions, 1);
    const Shape stride = spatial_attr(call, "window_strides", dimensions, 1);
    const Shape low = spatial_attr(call, "padding_low", dimensions, 0);
    const Shape high = spatial_attr(call, "padding_high", dimensions, 0);
    axes.fill({1, 1, 1, 1, 0, nullptr});
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

  Args args(const Tensor& in, void* winners, void* out) const {
    return {element_of(in.dtype), wide_winners(), in.shape.back(), {axes[0], axes[1], axes[2]}, in.data, winners, out};
  }
  bool wide_winners() const { return positions > 256; }
  DType winner_type() const { return wide_winners() ? DType::S32 : DType::U8; }
};

// ---- blocks

// The rows of every entry of a tensor's batch in blocks.
struct Blocks {
  int64_t entries, rows, block_rows;

  explicit Blocks(const Tensor& t) : entries(t.shape[0]), rows(t.shape[1]) {
    constexpr int64_t kBlockElements = 16 << 10;
    block_rows = std::max<int64_t>(kBlockElements / (t.size() / (entries * rows)), 1);
  }
  int64_t per_entry() const { return parts(rows, block_rows); }
  int64_t size() const { return entries * per_entry(); }
  Block operator[](int64_t i) const {
    const int64_t begin = i % per_entry() * block_rows;
    return {i / per_entry(), {begin, std::min(begin + block_rows, rows)}};
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
  const bool save_winners = call.attr<bool>("save_winners");
  call.expect_counts(1, 1 + save_winners);
  const Tensor x = call.operand(0, "x");
  check_image(call, x);
  const Geometry geometry(call, x);
  const Tensor y = call.checked(call.result(0, "y"), x.dtype, geometry.y_shape);
  void* winners = nullptr;
  if (save_winners) winners = call.checked(call.result(1, "winners"), geometry.winner_type(), geometry.y_shape).data;
  const Kernels& run = kernels();
  if (y.size() == 0) return;
  const Args args = geometry.args(x, winners, y.data);
  const Blocks blocks(y);
  parallel_for(blocks.size(), [&](int64_t i) {
    run.forward(args, blocks[i]);
  });
}

void bwd(const Call& call) {
  call.expect_counts(2, 1);
  const Tensor dx = call.result(0, "dx");
  check_image(call, dx);
  Geometry geometry(call, dx);
  const Tensor winners = call.checked(call.operand(0, "winners"), geometry.winner_type(), geometry.y_shape);
  const Tensor dy = call.checked(call.operand(1, "dy"), dx.dtype, geometry.y_shape);
  const Kernels& run = kernels();
  if (dx.size() == 0) return;
  std::array<std::vector<Range>, 3> ranges;
  for (size_t d = 0; d < 3; ++d) {
    ranges[d] = windows_of(geometry.axes[d]);
    geometry.axes[d].windows_of = ranges[d].data();
  }
  const Args args = geometry.args(dy, winners.data, dx.data);
  const Blocks blocks(dx);
  parallel_for(blocks.size(), [&](int64_t i) {
    run.backward(args, blocks[i]);
  });
}

JAXFUSE_HANDLER(jaxfuse_max_pool_fwd, fwd);
JAXFUSE_HANDLER(jaxfuse_max_pool_bwd, bwd);

}  // namespace
}  // namespace jaxfuse::max_pool
