// Normalisation, residual and activation, forward and backward. Both passes take z and activation' from here.
#pragma once

#include "activation_loops.h"
#include "batch_norm_kernels.h"
#include "batch_norm_stats_loops.h"

namespace jaxfuse::batch_norm {
namespace {

template <class Lanes>
Floats normalised(Floats x, const Affine& affine, int64_t c, Lanes lanes) {
  return (x - load(affine.center + c, lanes)) * load(affine.scale + c, lanes) + load(affine.offset + c, lanes);
}

// Where the derivative is 1.
template <Activation activation>
Ints passes(Floats z, const Parameters& parameters) {
  return pulled_back<activation>(Floats{} + 1.0f, z, parameters) == 1.0f;
}

template <class T, class Lanes>
void put(T* p, Floats v, Lanes lanes, bool stream) {
  stream ? store_streaming(p, v, lanes) : store(p, v, lanes);
}

template <class T, Activation activation, bool has_residual, bool save_mask>
void apply(const ApplyArgs args, const Tile tile) {
  for (int64_t row = tile.row_begin; row < tile.row_end; ++row) {
    const int64_t start = row * args.channels;
    const T* x = static_cast<const T*>(args.x) + start;
    const T* residual = has_residual ? static_cast<const T*>(args.residual) + start : nullptr;
    T* y = static_cast<T*>(args.y) + start;
    uint8_t* mask = save_mask ? args.mask + row * ((args.channels + 7) / 8) : nullptr;
    for_vectors(tile.channel_begin, tile.channel_end, [&](int64_t c, auto lanes) {
      Floats z = normalised(load(x + c, lanes), args.affine, c, lanes);
      if constexpr (has_residual) z += load(residual + c, lanes);
      if constexpr (save_mask) store_lane_bits(mask + c / 8, to_bits(passes<activation>(round_to<T>(z), args.parameters)), lanes);
      put(y + c, round_to<T>(activated<activation>(z, args.parameters)), lanes, args.stream);
    });
  }
  finish_streaming();
}

// g = dy·activation' for one row; what is not needed is not read.
template <class T, Derivative derivative, Activation activation>
struct Gradient {
  const BackwardArgs& args;
  const T* dy;
  const T* residual;
  const uint8_t* mask;

  Gradient(const BackwardArgs& args, int64_t row)
      : args(args),
        dy(static_cast<const T*>(args.dy) + row * args.channels),
        residual(args.residual ? static_cast<const T*>(args.residual) + row * args.channels : nullptr),
        mask(derivative == Derivative::mask ? args.mask + row * ((args.channels + 7) / 8) : nullptr) {}

  template <class Lanes>
  Floats operator()(Floats x, int64_t c, Lanes lanes) const {
    const Floats g = load(dy + c, lanes);
    if constexpr (derivative == Derivative::none) return g;
    if constexpr (derivative == Derivative::mask) {
      return from_bits(load_lane_bits(mask + c / 8, lanes)) ? g : Floats{};
    }
    Floats z = normalised(x, args.affine, c, lanes);  // bit for bit what apply() had
    if (residual) z += load(residual + c, lanes);
    if constexpr (is_gate(activation)) z = round_to<T>(z);
    return pulled_back<activation>(g, z, args.parameters);
  }
};

struct BlockSums {
  ChannelSums g, gx;
};

template <class T, Derivative derivative, Activation activation>
void add_gradient_row(BlockSums& block, const BackwardArgs args, const Tile tile, int64_t row, int64_t ahead) {
  const Gradient<T, derivative, activation> gradient(args, row);
  const T* x = static_cast<const T*>(args.x) + row * args.channels;
  for_vectors(tile.channel_begin, tile.channel_end, [&](int64_t c, auto lanes) {
    __builtin_prefetch(x + c + ahead);
    __builtin_prefetch(gradient.dy + c + ahead);
    const Floats value = load(x + c, lanes);
    const Floats g = gradient(value, c, lanes);
    float *sum_g = block.g.values + (c - tile.channel_begin), *sum_gx = block.gx.values + (c - tile.channel_begin);
    store(sum_g, load(sum_g) + g);
    store(sum_gx, load(sum_gx) + g * (value - load(args.mean + c, lanes)));
  });
}

template <class T, Derivative derivative, Activation activation>
void backward_stats(const BackwardArgs& args, const Tile& tile, double* sum_g, double* sum_gx) {
  const int64_t width = tile.channel_end - tile.channel_begin, ahead = prefetch_distance<T>(tile, args.channels);
  for (int64_t c = 0; c < width; ++c) sum_g[c] = sum_gx[c] = 0;
  BlockSums block;
  for_blocks(tile, [&](int64_t begin, int64_t end) {
    block.g.clear(width);
    block.gx.clear(width);
    for (int64_t row = begin; row < end; ++row) {
      add_gradient_row<T, derivative, activation>(block, args, tile, row, ahead);
    }
    for (int64_t c = 0; c < width; ++c) {
      sum_g[c] += block.g.values[c];
      sum_gx[c] += block.gx.values[c];
    }
  });
}

template <class T, Derivative derivative, Activation activation, bool want_dresidual>
void backward_apply(const BackwardArgs args, const Tile tile) {
  const int64_t ahead = prefetch_distance<T>(tile, args.channels);
  for (int64_t row = tile.row_begin; row < tile.row_end; ++row) {
    const int64_t start = row * args.channels;
    const Gradient<T, derivative, activation> gradient(args, row);
    const T* x = static_cast<const T*>(args.x) + start;
    T* dx = static_cast<T*>(args.dx) + start;
    T* dresidual = want_dresidual ? static_cast<T*>(args.dresidual) + start : nullptr;
    for_vectors(tile.channel_begin, tile.channel_end, [&](int64_t c, auto lanes) {
      __builtin_prefetch(x + c + ahead);
      __builtin_prefetch(gradient.dy + c + ahead);
      const Floats value = load(x + c, lanes);
      const Floats g = gradient(value, c, lanes);
      const Floats centred = value - load(args.mean + c, lanes);
      const Floats result = load(args.a + c, lanes) * g + load(args.b + c, lanes) * centred + load(args.c + c, lanes);
      put(dx + c, round_to<T>(result), lanes, args.stream);
      if constexpr (want_dresidual) put(dresidual + c, round_to<T>(g), lanes, args.stream);
    });
  }
  finish_streaming();
}

}  // namespace
}  // namespace jaxfuse::batch_norm
