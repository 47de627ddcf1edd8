// Where the tiles of Winograd's lie: each reads 4×4 pixels of x and has 2×2 of y.
#pragma once

#include "conv.h"
#include "conv_winograd_kernels.h"
#include "cut.h"
#include "simd_level.h"

namespace jaxfuse::conv::winograd {

inline const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

struct Sizes {
  int64_t batch, height, width, channels, features, out_height, out_width, top, left;  // top, left: the padding there
  int64_t lines, per_line, tiles;                                                      // of tiles

  Sizes(const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y)
      : batch(x.shape[0]), height(x.shape[1]), width(x.shape[2]), channels(x.shape[3]), features(w.shape[g.rhs_spec[0]]),
        out_height(y.shape[1]), out_width(y.shape[2]), top(g.padding_low[0]), left(g.padding_low[1]), lines(parts(out_height, 2)),
        per_line(parts(out_width, 2)), tiles(batch * lines * per_line) {}
};

// Of a tile: the image, and its first output.
struct Position {
  int64_t image, line, column;

  Position(const Sizes& s, int64_t tile)
      : image(tile / s.per_line / s.lines), line(tile / s.per_line % s.lines * 2), column(tile % s.per_line * 2) {}

  // Its pixels of x and of y line by line; `zeros` are those outside.
  void find_inputs(const Sizes& s, const float* x, const float* zeros, const float** pixels) const {
    find<kSide>(x, s.height, s.width, s.channels, line - s.top, column - s.left, zeros, pixels);
  }
  void find_outputs(const Sizes& s, const float* y, const float* zeros, const float** pixels) const {
    find<2>(y, s.out_height, s.out_width, s.features, line, column, zeros, pixels);
  }

 private:
  template <int64_t side>
  void find(const float* data, int64_t height, int64_t width, int64_t size, int64_t top, int64_t left, const float* zeros,
            const float** pixels) const {
    const float* const first = data + ((image * height + top) * width + left) * size;
    const bool whole = top >= 0 && left >= 0 && top + side <= height && left + side <= width;
    for (int64_t i = 0; i < side; ++i) {
      for (int64_t j = 0; j < side; ++j) {
        const bool inside = whole || (top + i >= 0 && top + i < height && left + j >= 0 && left + j < width);
        pixels[i * side + j] = inside ? first + (i * width + j) * size : zeros;
      }
    }
  }
};

}  // namespace jaxfuse::conv::winograd
