// Mean and variance of a tile, and what all of batch norm's sums over rows share.
#pragma once

#include "batch_norm_kernels.h"
#include "simd.h"

namespace jaxfuse::batch_norm {
namespace {

// Rows summed in f32, of values eight at a time, before the sums go to f64. Gradients may all be the same, as behind a mean over the
// pixels: then each addition may err to the same side.
constexpr int64_t kBlockRows = 256, kGradientRows = 32;

// What is held per channel, in the L1 cache, while a tile's rows go by.
struct ChannelSums {
  alignas(64) float values[kMaxTileChannels];

  void clear(int64_t width) {
    for (int64_t c = 0; c < width; c += kLanes) store(values + c, Floats{});
  }
};

// How far ahead of the loads to prefetch, in elements: whole rows, at least `bytes` of the tile. Measured: with 4 KB the
// loops that read two tensors are up to 1.4 times as fast when these come from memory.
template <class T>
int64_t prefetch_distance(const Tile& tile, int64_t channels, int64_t bytes = 4096) {
  const int64_t row_bytes = (tile.channel_end - tile.channel_begin) * int64_t(sizeof(T));
  return (bytes + row_bytes - 1) / row_bytes * channels;
}

// f(begin, end) for the tile's rows in blocks.
template <int64_t kRows, class F>
void for_blocks(const Tile& tile, F f) {
  for (int64_t row = tile.row_begin; row < tile.row_end; row += kRows) {
    f(row, row + kRows < tile.row_end ? row + kRows : tile.row_end);
  }
}

struct MergeWeights {
  double inverse_n, inverse_n_other, weight;
  MergeWeights(double n, double n_other)
      : inverse_n(n ? 1 / n : 0), inverse_n_other(1 / n_other), weight(n * n_other / (n + n_other)) {}
};

// Chan, Golub and LeVeque: m2 of two sets together = m2 + m2' + (mean' - mean)²·n·n'/(n + n'). Sums, not means, are held:
// an Inf among them stays one.
inline void merge_channel(double& sum, double& m2, double other_sum, double other_m2, const MergeWeights& by) {
  const double gap = other_sum * by.inverse_n_other - sum * by.inverse_n;
  sum += other_sum;
  m2 += other_m2 + gap * gap * by.weight;
}

inline void merge(double* sum, double* m2, double n, const double* other_sum, const double* other_m2, double n_other,
                  int64_t channels) {
  const MergeWeights weights(n, n_other);
  for (int64_t c = 0; c < channels; ++c) merge_channel(sum[c], m2[c], other_sum[c], other_m2[c], weights);
}

// Sums over a block of rows about a shift. The shift is the mean of m of the block's n values, so that
// (mean - shift)² <= n/m·variance whatever the values are: what Σ d² - (Σ d)²/n cancels is at most n/m times what it leaves.
struct BlockMoments {
  ChannelSums shift, sum, square;  // d = x - shift: Σ d, Σ d²
};

// An Inf or NaN among the first rows must not spoil the other rows' d: there the shift is 0.
template <class T>
void begin_block(BlockMoments& block, const T* x, int64_t stride, int64_t rows, int64_t width) {
  constexpr int64_t kShiftRows = 8;
  const int64_t n = rows < kShiftRows ? rows : kShiftRows;
  for_vectors(0, width, [&](int64_t c, auto lanes) {
    Floats total = load(x + c, lanes);
    for (int64_t r = 1; r < n; ++r) total += load(x + r * stride + c, lanes);
    const Floats mean = total * (1.0f / float(n));
    store(block.shift.values + c, mean - mean == 0.0f ? mean : Floats{});
  });
  block.sum.clear(width);
  block.square.clear(width);
}

template <int n>
Floats tree_sum(const Floats* v) {
  if constexpr (n == 1) {
    return v[0];
  } else {
    return tree_sum<n / 2>(v) + tree_sum<n / 2>(v + n / 2);
  }
}

template <int kRows, class T>
void add_rows(BlockMoments& block, const T* x, int64_t stride, int64_t width, int64_t ahead) {
  for_vectors(0, width, [&](int64_t c, auto lanes) {
    const Floats shift = load(block.shift.values + c);
    Floats d[kRows], squares[kRows];
    for (int r = 0; r < kRows; ++r) {
      __builtin_prefetch(x + r * stride + c + ahead);
      d[r] = load(x + r * stride + c, lanes) - shift;
      squares[r] = d[r] * d[r];
    }
    float *sum = block.sum.values + c, *square = block.square.values + c;
    store(sum, load(sum) + tree_sum<kRows>(d));
    store(square, load(square) + tree_sum<kRows>(squares));
  });
}

// Adds the block's n rows to the n_before rows in sum and m2.
inline void end_block(const BlockMoments& block, double n, double n_before, double* sum, double* m2, int64_t width) {
  const MergeWeights weights(n_before, n);
  for (int64_t c = 0; c < width; ++c) {
    const double d_sum = block.sum.values[c];
    const double block_m2 = block.square.values[c] - d_sum * d_sum * weights.inverse_n_other;
    merge_channel(sum[c], m2[c], n * block.shift.values[c] + d_sum, block_m2 < 0 ? 0 : block_m2, weights);
  }
}

template <class T>
void stats(const StatsArgs& args, const Tile& tile, double* sum, double* m2) {
  constexpr int kGroup = 8;
  const int64_t stride = args.channels, width = tile.channel_end - tile.channel_begin;
  // Narrow rows only: measured, with wide ones the CPU follows the group's rows better alone.
  constexpr int64_t kAhead = 8192;
  const int64_t ahead = kGroup * width * sizeof(T) <= kAhead ? prefetch_distance<T>(tile, stride, kAhead) : 0;
  for (int64_t c = 0; c < width; ++c) sum[c] = m2[c] = 0;
  BlockMoments block;
  for_blocks<kBlockRows>(tile, [&](int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(args.x) + begin * stride + tile.channel_begin;
    begin_block(block, x, stride, end - begin, width);
    int64_t row = begin;
    for (; row + kGroup <= end; row += kGroup, x += kGroup * stride) add_rows<kGroup>(block, x, stride, width, ahead);
    for (; row < end; ++row, x += stride) add_rows<1>(block, x, stride, width, ahead);
    end_block(block, double(end - begin), double(begin - tile.row_begin), sum, m2, width);
  });
}

}  // namespace
}  // namespace jaxfuse::batch_norm
