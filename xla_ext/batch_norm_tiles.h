// How batch norm's full-size tensors are cut up for the threads. Cuts depend on the shape alone, so that sums come out bit
// for bit the same in every run and with any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batch_norm_kernels.h"
#include "cut.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::batch_norm {

// A tensor of few channels seen with `copies` rows side by side as one: (rows/copies, copies·channels), so that its rows
// fill whole vectors. What is left over is one last row that is not full.
struct Folding {
  int64_t channels;       // of the tensor
  int64_t copies;
  int64_t rows;           // of the folded tensor, full ones
  int64_t last_channels;  // of the folded tensor's last row, 0 if there is none

  int64_t folded_channels() const { return copies * channels; }
  int64_t last_copies() const { return last_channels / channels; }

  // `vector` once for every copy.
  std::vector<float> repeat(const float* vector) const {
    std::vector<float> repeated;
    repeated.reserve(folded_channels());
    for (int64_t copy = 0; copy < copies; ++copy) repeated.insert(repeated.end(), vector, vector + channels);
    return repeated;
  }
};

// With a mask, rows are folded only where each fills whole bytes of it.
inline Folding fold(int64_t rows, int64_t channels, bool has_mask) {
  if (channels == 0) return {0, 1, rows, 0};
  int64_t copies = 1;
  while (copies * channels < kChannelStep || copies * channels % kWidestVector) ++copies;
  if (copies * channels > kMaxTileChannels || (has_mask && channels % 8)) copies = 1;
  return {channels, copies, rows / copies, rows % copies * channels};
}

// Whether an output should be stored past the caches, and can be: its vectors must be aligned. Measured with an L3 cache of
// 32 MB: outputs of 51 and 103 MB gain 10 to 20 %, with the next reading of them counted in, 26 MB about nothing; what
// fits in the cache (6 MB) loses up to half.
inline bool streams(const void* output, int64_t bytes, const Folding& folding) {
  constexpr int64_t kLargerThanCaches = 32 << 20;
  return bytes > kLargerThanCaches && reinterpret_cast<uintptr_t>(output) % 64 == 0 &&
         folding.folded_channels() % kWidestVector == 0;
}

// The tiles of a (rows, channels) tensor, row by row of tiles.
struct TileGrid {
  int64_t rows, channels, tile_rows, tile_channels;

  int64_t down() const { return parts(rows, tile_rows); }
  int64_t across() const { return parts(channels, tile_channels); }
  int64_t size() const { return down() * across(); }

  Tile operator[](int64_t i) const {
    const int64_t row = i / across() * tile_rows, channel = i % across() * tile_channels;
    return {row, std::min(row + tile_rows, rows), channel, std::min(channel + tile_channels, channels)};
  }
};

// Tiles small enough to go round and large enough to be worth a thread's while. Rows are cut first, down to min_rows.
inline TileGrid cut(int64_t rows, int64_t channels, int64_t min_rows) {
  constexpr int64_t kTiles = 8, kMinTile = 16 << 10, kMaxTile = 128 << 10;
  const int64_t tile = std::clamp(rows * channels / kTiles, kMinTile, kMaxTile);
  const int64_t tile_rows = std::max(tile / channels, min_rows);
  const int64_t steps = tile / std::clamp<int64_t>(rows, 1, tile_rows) / kChannelStep + 1;
  return {rows, channels, tile_rows, std::min(steps * kChannelStep, kMaxTileChannels)};
}

// f(tile, number of its row of tiles) for every tile, then for the row that is not full, on threads.
template <class F>
void for_tiles(const Folding& folding, const TileGrid& grid, const F& f) {
  const int64_t chunks = std::max<int64_t>(grid.size(), 1);
  parallel_for(chunks, [&](int64_t chunk) {
    if (chunk < grid.size()) f(grid[chunk], chunk / grid.across());
    if (chunk == chunks - 1 && folding.last_channels) {
      f(Tile{folding.rows, folding.rows + 1, 0, folding.last_channels}, grid.down());
    }
  });
}

// Two sums for every channel.
struct ChannelPairs {
  std::vector<double> first, second;
  explicit ChannelPairs(int64_t n) : first(n), second(n) {}
};

// kernel(tile, first, second) gives the tile's sums; combine(first, second, n, first', second', n', channels) adds to the
// sums of n rows those of n' others. Always in the same order.
template <class Kernel, class Combine>
ChannelPairs reduce(const Folding& folding, const Kernel& kernel, const Combine& combine) {
  constexpr int64_t kMinRows = 128;  // so that a tile's sums are small beside the tile
  const int64_t width = folding.folded_channels(), channels = folding.channels;
  const TileGrid grid = cut(folding.rows, width, kMinRows);
  const int64_t down = grid.down();
  const Scratch memory(2 * (down + 1) * width * sizeof(double));
  double *const first = memory.as<double>(), *const second = first + (down + 1) * width;
  ChannelPairs folded(width), total(channels);
  for_tiles(folding, grid, [&](const Tile& tile, int64_t i) {
    const int64_t at = i * width + tile.channel_begin;
    kernel(tile, first + at, second + at);
  });
  parallel_for(parts(width, kChannelStep), [&](int64_t task) {
    const int64_t begin = task * kChannelStep, channels = std::min(kChannelStep, width - begin);
    const auto add_part = [&](int64_t i, int64_t n, int64_t rows, int64_t count) {
      const int64_t at = i * width + begin;
      combine(&folded.first[begin], &folded.second[begin], double(n), first + at, second + at, double(rows), count);
    };
    for (int64_t i = 0, n = 0; i < down; ++i, n += grid.tile_rows) add_part(i, n, std::min(grid.tile_rows, folding.rows - n), channels);
    const int64_t last = std::min(folding.last_channels - begin, channels);
    if (last > 0) add_part(down, folding.rows, 1, last);
  });
  for (int64_t copy = 0, n = 0; copy < folding.copies; ++copy) {
    const int64_t rows = folding.rows + (copy < folding.last_copies());
    if (rows == 0) break;
    combine(&total.first[0], &total.second[0], double(n), &folded.first[copy * channels],
            &folded.second[copy * channels], double(rows), channels);
    n += rows;
  }
  return total;
}

}  // namespace jaxfuse::batch_norm
