// Batch norm on (rows, channels), channels last, as four FFI targets that each read every full-size tensor once:
//   jaxfuse_batch_norm_stats      x                     -> mean, var
//   jaxfuse_batch_norm_apply      x, ..., [residual]    -> y = act((x - center)·scale + offset + residual), [mask]
//   jaxfuse_batch_norm_bwd_stats  dy, x, mean, ...      -> Σ g, Σ g·(x - mean)           g = dy·act'
//   jaxfuse_batch_norm_bwd_apply  dy, x, mean, ...      -> a·g + b·(x - mean) + c, [g]
// This file checks the arguments and puts tiles together; the arithmetic is in batch_norm_loops.h.
#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

#include "activation_attr.h"
#include "batch_norm_kernels.h"
#include "batch_norm_tiles.h"
#include "handler.h"
#include "simd_level.h"

namespace jaxfuse::batch_norm {
namespace {

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

// ---- arguments

// A full-size tensor's shape as the loops see it.
struct Rows {
  int64_t rows, channels;
};

Tensor full_size(const Call& call, size_t i, const char* name) {
  const Tensor x = call.operand(i, name);
  call.expect_dtype(x, {DType::F32, DType::BF16, DType::F16});
  if (x.shape.size() < 2) call.refuse(name, " has shape ", to_string(x.shape), ", expected at least 2 dimensions");
  return x;
}

Rows rows_of(const Tensor& x) {
  return {size_of(Shape(x.shape.begin(), x.shape.end() - 1)), x.shape.back()};
}

int64_t bytes_of(const Tensor& x) { return x.size() * int64_t(ffi::ByteWidth(x.dtype)); }

Tensor like(const Call& call, const Tensor& t, const Tensor& model) { return call.checked(t, model.dtype, model.shape); }

float* per_channel(const Call& call, const Tensor& t, const Tensor& x) {
  return call.checked(t, DType::F32, {x.shape.back()}).as<float>();
}

uint8_t* mask_for(const Call& call, const Tensor& t, const Tensor& x) {
  const auto [rows, channels] = rows_of(x);
  return call.checked(t, DType::U8, {rows, (channels + 7) / 8}).as<uint8_t>();
}

// Per-channel operands, once for every copy of a folded tensor.
struct FoldedAffine {
  std::vector<float> center, scale, offset;
  Affine view() const { return {center.data(), scale.data(), offset.data()}; }
};

Derivative derivative_attr(const Call& call, Activation activation) {
  const auto name = call.attr<std::string_view>("deriv");
  const bool known = name == "none" || name == "mask" || name == "recompute";
  if (!known) call.refuse("attribute deriv is \"", name, "\", expected none, mask or recompute");
  if ((name == "none") != (activation == Activation::none)) {
    call.refuse("attributes activation = \"", call.attr<std::string_view>("activation"), "\" and deriv = \"", name,
                "\" contradict each other: deriv must be none where activation is none, mask or recompute elsewhere");
  }
  return name == "none" ? Derivative::none : name == "mask" ? Derivative::mask : Derivative::recompute;
}

FoldedAffine affine_operands(const Call& call, size_t first, const Tensor& x, const Folding& folding) {
  return {folding.repeat(per_channel(call, call.operand(first, "center"), x)),
          folding.repeat(per_channel(call, call.operand(first + 1, "scale"), x)),
          folding.repeat(per_channel(call, call.operand(first + 2, "offset"), x))};
}

// ---- targets

void stats(const Call& call) {
  call.expect_counts(1, 2);
  const Tensor x = full_size(call, 0, "x");
  float* mean = per_channel(call, call.result(0, "mean"), x);
  float* var = per_channel(call, call.result(1, "var"), x);
  const Kernels& run = kernels();
  const auto [rows, channels] = rows_of(x);
  if (channels == 0) return;
  if (rows == 0) {
    std::fill_n(mean, channels, std::numeric_limits<float>::quiet_NaN());
    std::fill_n(var, channels, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const Folding folding = fold(rows, channels, false);
  const StatsArgs args{element_of(x.dtype), folding.folded_channels(), x.data};
  const ChannelPairs moments = reduce(
      folding, [&](const Tile& tile, double* sum, double* m2) { run.stats(args, tile, sum, m2); }, run.merge);
  for (int64_t c = 0; c < channels; ++c) {
    mean[c] = float(moments.first[c] / double(rows));
    var[c] = float(moments.second[c] / double(rows));
  }
}

void apply(const Call& call) {
  const bool has_residual = call.attr<bool>("has_residual");
  const Activation activation = activation_attr(call);
  const Parameters parameters = parameters_attr(call);
  const bool save_mask = save_mask_attr(call, activation, parameters);
  call.expect_counts(4 + has_residual, 1 + save_mask);
  const Tensor x = full_size(call, 0, "x");
  const auto [rows, channels] = rows_of(x);
  const Kernels& run = kernels();
  const Folding folding = fold(rows, channels, save_mask);
  const FoldedAffine affine = affine_operands(call, 1, x, folding);
  const Tensor y = like(call, call.result(0, "y"), x);
  const ApplyArgs args{element_of(x.dtype),
                       folding.folded_channels(),
                       activation,
                       parameters,
                       x.data,
                       affine.view(),
                       has_residual ? like(call, call.operand(4, "residual"), x).data : nullptr,
                       y.data,
                       save_mask ? mask_for(call, call.result(1, "mask"), x) : nullptr,
                       streams(y.data, bytes_of(y), folding)};
  if (x.size() == 0) return;
  for_tiles(folding, cut(folding.rows, args.channels, 1), [&](const Tile& tile, int64_t) { run.apply(args, tile); });
}

// What both backward targets have: operands dy, x, mean, `coefficients` of a, b, c, then those of the derivative: the mask,
// or center, scale, offset and the residual if there was one.
struct Backward {
  Folding folding;
  std::vector<float> mean, a, b, c;
  FoldedAffine affine;
  Tensor x;
  BackwardArgs args;

  Backward(const Call& call, bool with_coefficients, size_t results) : x(full_size(call, 1, "x")) {
    const Activation activation = activation_attr(call);
    const Derivative derivative = derivative_attr(call, activation);
    const bool has_mask = derivative == Derivative::mask, recomputes = derivative == Derivative::recompute;
    const bool has_residual = recomputes && call.attr<bool>("has_residual");
    const size_t next = with_coefficients ? 6 : 3;
    call.expect_counts(next + (has_mask ? 1 : recomputes ? 3 + has_residual : 0), results);
    const auto [rows, channels] = rows_of(x);
    folding = fold(rows, channels, has_mask);
    const auto folded = [&](size_t i, const char* name) {
      return folding.repeat(per_channel(call, call.operand(i, name), x));
    };
    mean = folded(2, "mean");
    if (with_coefficients) a = folded(3, "a"), b = folded(4, "b"), c = folded(5, "c");
    if (recomputes) affine = affine_operands(call, next, x, folding);
    args = {element_of(x.dtype),
            folding.folded_channels(),
            activation,
            parameters_attr(call),
            derivative,
            like(call, call.operand(0, "dy"), x).data,
            x.data,
            mean.data(),
            has_mask ? mask_for(call, call.operand(next, "mask"), x) : nullptr,
            affine.view(),
            has_residual ? like(call, call.operand(next + 3, "residual"), x).data : nullptr,
            a.data(),
            b.data(),
            c.data(),
            nullptr,
            nullptr,
            false};
  }
  Backward(const Backward&) = delete;  // args points into it
};

void bwd_stats(const Call& call) {
  const Backward backward(call, false, 2);
  float* sum_g = per_channel(call, call.result(0, "sum_g"), backward.x);
  float* sum_gx = per_channel(call, call.result(1, "sum_gx"), backward.x);
  const Kernels& run = kernels();
  const int64_t channels = backward.x.shape.back();
  if (channels == 0) return;
  const ChannelPairs sums = reduce(
      backward.folding,
      [&](const Tile& tile, double* g, double* gx) { run.backward_stats(backward.args, tile, g, gx); },
      [](double* g, double* gx, double, const double* other_g, const double* other_gx, double, int64_t n) {
        for (int64_t i = 0; i < n; ++i) g[i] += other_g[i], gx[i] += other_gx[i];
      });
  std::copy_n(&sums.first[0], channels, sum_g);
  std::copy_n(&sums.second[0], channels, sum_gx);
}

void bwd_apply(const Call& call) {
  const bool want_dresidual = call.attr<bool>("want_dresidual");
  Backward backward(call, true, 1 + want_dresidual);
  BackwardArgs& args = backward.args;
  args.dx = like(call, call.result(0, "dx"), backward.x).data;
  args.stream = streams(args.dx, bytes_of(backward.x), backward.folding);
  if (want_dresidual) {
    args.dresidual = like(call, call.result(1, "dresidual"), backward.x).data;
    args.stream &= streams(args.dresidual, bytes_of(backward.x), backward.folding);
  }
  const Kernels& run = kernels();
  if (backward.x.size() == 0) return;
  const TileGrid grid = cut(backward.folding.rows, args.channels, 1);
  for_tiles(backward.folding, grid, [&](const Tile& tile, int64_t) { run.backward_apply(args, tile); });
}

JAXFUSE_HANDLER(jaxfuse_batch_norm_stats, stats);
JAXFUSE_HANDLER(jaxfuse_batch_norm_apply, apply);
JAXFUSE_HANDLER(jaxfuse_batch_norm_bwd_stats, bwd_stats);
JAXFUSE_HANDLER(jaxfuse_batch_norm_bwd_apply, bwd_apply);

}  // namespace
}  // namespace jaxfuse::batch_norm
