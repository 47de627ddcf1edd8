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

template <class T, class Lanes>
void put(T* p, Floats v, Lanes lanes, bool stream) {
  stream ? store_streaming(p, v, lanes) : store(p, v, lanes);
}

template <class T, bool has_residual, bool save_mask, class Act>
void apply(const ApplyArgs args, const Tile tile, const Act act) {
  for (int64_t row = tile.row_begin; row < tile.row_end; ++row) {
    const int64_t start = row * args.channels;
    const T* x = static_cast<const T*>(args.x) + start;
    const T* residual = has_residual ? static_cast<const T*>(args.residual) + start : nullptr;
    T* y = static_cast<T*>(args.y) + start;
    uint8_t* mask = save_mask ? args.mask + row * ((args.channels + 7) / 8) : nullptr;
    for_groups<Act::kMost>(tile.channel_begin, tile.channel_end, [&](int64_t first, int64_t n, auto lanes) {
      const auto z_at = [&](int64_t i) {
        const int64_t c = first + i * kLanes;
        Floats z = normalised(load(x + c, lanes), args.affine, c, lanes);
        if constexpr (has_residual) z += load(residual + c, lanes);
        if constexpr (save_mask) store_lane_bits(mask + c / 8, to_bits(act.passes(round_to<T>(z))), lanes);
        return z;
      };
      act(n, z_at, [&](int64_t i, Floats value) { put(y + first + i * kLanes, round_to<T>(value), lanes, args.stream); });
    });
  }
  finish_streaming();
}

// f(channel, dy·activation', lanes) for one row of the tile; `by_mask`: activation' is the mask's bit.
template <class T, bool by_mask, class Act, class F>
void for_gradients(const BackwardArgs& args, const Tile& tile, int64_t row, int64_t ahead, const Act& act, F f) {
  const T *x = static_cast<const T*>(args.x) + row * args.channels, *dy = static_cast<const T*>(args.dy) + row * args.channels;
  const T* residual = args.residual ? static_cast<const T*>(args.residual) + row * args.channels : nullptr;
  const uint8_t* mask = by_mask ? args.mask + row * ((args.channels + 7) / 8) : nullptr;
  for_groups<Act::kMost>(tile.channel_begin, tile.channel_end, [&](int64_t first, int64_t n, auto lanes) {
    const auto g_at = [&](int64_t i) {
      const int64_t c = first + i * kLanes;
      __builtin_prefetch(x + c + ahead);
      __builtin_prefetch(dy + c + ahead);
      const Floats g = load(dy + c, lanes);
      if constexpr (by_mask) return from_bits(load_lane_bits(mask + c / 8, lanes)) ? g : Floats{};
      return g;
    };
    const auto z_at = [&](int64_t i) {
      const int64_t c = first + i * kLanes;
      Floats z = normalised(load(x + c, lanes), args.affine, c, lanes);  // bit for bit what apply() had
      if (residual) z += load(residual + c, lanes);
      return Act::kIsGate ? round_to<T>(z) : z;
    };
    act(n, g_at, z_at, [&](int64_t i, Floats g) { f(first + i * kLanes, g, lanes); });
  });
}

struct BlockSums {
  ChannelSums g, gx;
};

template <class T, bool by_mask, class Act>
void add_gradient_row(BlockSums& block, const BackwardArgs args, const Tile tile, int64_t row, int64_t ahead, const Act act) {
  const T* x = static_cast<const T*>(args.x) + row * args.channels;
  for_gradients<T, by_mask>(args, tile, row, ahead, act, [&](int64_t c, Floats g, auto lanes) {
    float *sum_g = block.g.values + (c - tile.channel_begin), *sum_gx = block.gx.values + (c - tile.channel_begin);
    store(sum_g, load(sum_g) + g);
    store(sum_gx, load(sum_gx) + g * (load(x + c, lanes) - load(args.mean + c, lanes)));
  });
}

template <class T, bool by_mask, class Act>
void backward_stats(const BackwardArgs& args, const Tile& tile, const Act& act, double* sum_g, double* sum_gx) {
  const int64_t width = tile.channel_end - tile.channel_begin, ahead = prefetch_distance<T>(tile, args.channels);
  for (int64_t c = 0; c < width; ++c) sum_g[c] = sum_gx[c] = 0;
  BlockSums block;
  for_blocks<kGradientRows>(tile, [&](int64_t begin, int64_t end) {
    block.g.clear(width);
    block.gx.clear(width);
    for (int64_t row = begin; row < end; ++row) add_gradient_row<T, by_mask>(block, args, tile, row, ahead, act);
    for (int64_t c = 0; c < width; ++c) {
      sum_g[c] += block.g.values[c];
      sum_gx[c] += block.gx.values[c];
    }
  });
}

template <class T, bool by_mask, bool want_dresidual, class Act>
void backward_apply(const BackwardArgs args, const Tile tile, const Act act) {
  const int64_t ahead = prefetch_distance<T>(tile, args.channels);
  for (int64_t row = tile.row_begin; row < tile.row_end; ++row) {
    const int64_t start = row * args.channels;
    const T* x = static_cast<const T*>(args.x) + start;
    T* dx = static_cast<T*>(args.dx) + start;
    T* dresidual = want_dresidual ? static_cast<T*>(args.dresidual) + start : nullptr;
    for_gradients<T, by_mask>(args, tile, row, ahead, act, [&](int64_t c, Floats g, auto lanes) {
      const Floats centred = load(x + c, lanes) - load(args.mean + c, lanes);
      const Floats result = load(args.a + c, lanes) * g + load(args.b + c, lanes) * centred + load(args.c + c, lanes);
      put(dx + c, round_to<T>(result), lanes, args.stream);
      if constexpr (want_dresidual) put(dresidual + c, round_to<T>(g), lanes, args.stream);
    });
  }
  finish_streaming();
}

}  // namespace
}  // namespace jaxfuse::batch_norm
