// A task takes some tiles, and one line of the 4×4 points after the other: for it transforms all channels of its tiles, and for each panel
// of features multiplies them by the transformed filter, and adds what the products contribute to the outputs. So a line of points and
// the outputs stay in the second-level cache. Where there are few tiles each thread has all of them, and takes panels line by line, its
// own part first: the filter is read once.
#include "conv_winograd.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "contraction.h"
#include "conv_contraction.h"
#include "conv_winograd_tiles.h"
#include "parallel.h"
#include "scratch.h"

namespace jaxfuse::conv::winograd {
namespace {

constexpr int64_t kInner = 128;            // products of a sum in f32, which is then added to those before
constexpr int64_t kTaskFloats = 96 << 10;  // of a line of points, its products, and outputs: they stay in the second-level cache
constexpr int64_t kPadding = 16;           // between their rows: a power of two would meet in the same lines of the cache

class Winograd {
 public:
  // By the filter that is transformed and packed, if it is given.
  Winograd(const Forward& f, const char* filter)
      : f_(f), s_(f.geometry, f.x, f.w, f.y()), loops_(kernels()), tile_columns_(contraction::kernels().columns), products_(contraction::kernels().f32),
        panels_{s_.channels, s_.features, kPoints, DType::F32}, layout_(filter ? panels_.layout() : contraction::side_by_side()),
        row_(s_.channels + kPadding), filter_(filter), zeros_(s_.channels),
        epilogue_(f.epilogue, {f.y().size() / s_.features, s_.features}) {}

  // By f.w; `flipped`: read from its last tap to its first.
  bool run(bool flipped) {
    const Scratch filter(contraction::side_by_side_bytes(panels_));
    transform_filter(flipped, filter.data());
    filter_ = filter.data();
    return run();
  }

  bool run() const {
    const int64_t panels = parts(s_.features, tile_columns_), threads = max_threads();
    if (panels >= threads && s_.tiles * floats_of_tile(parts(panels, threads)) <= kTaskFloats) return run_by_panels(panels, threads);
    const int64_t most = std::max(kTaskFloats / floats_of_tile(panels), products_.rows);
    // As many tasks for each thread.
    const int64_t tasks = std::min(padded(parts(s_.tiles, most), threads), parts(s_.tiles, products_.rows));
    std::atomic<bool> finite{true};
    parallel_for(tasks, [&](int64_t i) {
      const int64_t first = i * s_.tiles / tasks, count = (i + 1) * s_.tiles / tasks - first;
      const Scratch outputs(panels * output_bytes(count));
      const Part part(*this, first, count, outputs.as<float>());
      for (int64_t line = 0; line < kSide; ++line) {
        part.transform(line);
        for (int64_t panel = 0; panel < panels; ++panel) {
          if (!part.add(line, panel)) finite = false;
        }
      }
      for (int64_t panel = 0; panel < panels; ++panel) part.finish(panel);
    });
    return finite;
  }

 private:
  void transform_filter(bool flipped, char* to) const {
    const Shape strides = f_.geometry.filter_strides(f_.w);
    constexpr int64_t kStep = 32;  // channels
    const int64_t steps = parts(s_.channels, kStep), columns = tile_columns_, point = s_.channels * columns;
    parallel_for(parts(s_.features, columns) * steps, [&](int64_t i) {
      const int64_t feature = i / steps * columns, channel = i % steps * kStep;
      const float* w = f_.w.as<float>() + feature * strides[0] + channel * strides[1];
      Filter filter{w, strides[2], strides[3], strides[1], strides[0]};
      if (flipped) filter = {w + 2 * (strides[2] + strides[3]), -strides[2], -strides[3], strides[1], strides[0]};
      loops_.transform_filter(filter, std::min(kStep, s_.channels - channel), s_.features - feature,
                              reinterpret_cast<float*>(to) + feature * s_.channels * kPoints + channel * columns, columns, point);
    });
  }

  int64_t floats_of_tile(int64_t panels) const { return kSide * (row_ + (1 + panels) * tile_columns_); }
  int64_t output_bytes(int64_t tiles) const { return kSide * tiles * tile_columns_ * int64_t(sizeof(float)); }

  // The lines of points that threads have taken of a panel, and those that are done: one after the other, since its outputs are sums.
  struct alignas(64) Lines {
    std::atomic<int64_t> taken{0}, done{0};

    bool take(int64_t line) { return taken.compare_exchange_strong(line, line + 1, std::memory_order_relaxed); }
    void wait_for(int64_t line) const {
      while (done.load(std::memory_order_acquire) < line) std::this_thread::yield();
    }
  };

  bool run_by_panels(int64_t panels, int64_t threads) const {
    const Scratch outputs(panels * output_bytes(s_.tiles));
    std::vector<Lines> lines(panels);
    std::atomic<bool> finite{true};
    on_each_thread([&](int thread) {
      const Part part(*this, 0, s_.tiles, outputs.as<float>());
      for (int64_t line = 0; line < kSide; ++line) {
        part.transform(line);
        for (int64_t i = 0; i < panels; ++i) {
          const int64_t panel = (thread * panels / threads + i) % panels;
          if (!lines[panel].take(line)) continue;
          lines[panel].wait_for(line);
          if (!part.add(line, panel)) finite = false;
          if (line == kSide - 1) part.finish(panel);
          lines[panel].done.store(line + 1, std::memory_order_release);
        }
      }
    }, int(threads));
    return finite;
  }

  // Some tiles by all panels, whose outputs are given.
  class Part {
   public:
    Part(const Winograd& w, int64_t first, int64_t count, float* outputs)
        : w_(w), s_(w.s_), columns_(w.tile_columns_), first_(first), count_(count),
          scratch_(count * w.floats_of_tile(0) * sizeof(float)), points_(scratch_.as<float>()), sums_(points_ + kSide * count * w.row_),
          outputs_(outputs), rows_(count), pixels_(count * kPoints) {
      for (int64_t t = 0; t < count; ++t) {
        rows_[t] = reinterpret_cast<const char*>(points_ + t * w.row_);
        Position(s_, first + t).find_inputs(s_, w.f_.x.as<float>(), w.zeros_.data(), &pixels_[t * kPoints]);
      }
    }

    // Line `line` of the points of all tiles.
    void transform(int64_t line) const {
      for (int64_t t = 0; t < count_; ++t) {
        w_.loops_.transform_input(&pixels_[t * kPoints], line, s_.channels, points_ + t * w_.row_, count_ * w_.row_);
      }
    }

    // What the line adds to a panel's outputs, after those before it; whether what is there now is finite.
    bool add(int64_t line, int64_t panel) const {
      for (int64_t j = 0; j < kSide; ++j) multiply(panel, line * kSide + j);
      float* const z = outputs(panel);
      return w_.loops_.add_outputs({sums_, count_ * columns_, columns_, count_, columns(panel), {z, z + 2 * count_ * columns_}}, line);
    }

    // What follows the last line, line by line of tiles.
    void finish(int64_t panel) const {
      for (int64_t t = 0, beside; t < count_; t += beside) {
        const Position at(s_, first_ + t);
        beside = std::min(count_ - t, s_.per_line - at.column / 2);
        for (int64_t line = 0; line < std::min<int64_t>(2, s_.out_height - at.line); ++line) {
          const int64_t pixel = (at.image * s_.out_height + at.line + line) * s_.out_width + at.column;
          const int64_t pixels = std::min(2 * beside, s_.out_width - at.column);
          const float* const z = outputs(panel) + (line * count_ + t) * 2 * columns_;
          epilogue::kernels().apply(
              w_.epilogue_.tile(z, DType::F32, columns_, pixel * s_.features + feature(panel), feature(panel), columns(panel)), 0, pixels);
        }
      }
    }

   private:
    int64_t feature(int64_t panel) const { return panel * columns_; }
    // Of a tile of products; nothing writes the others.
    int64_t columns(int64_t panel) const { return std::min(columns_, s_.features - feature(panel)); }
    float* outputs(int64_t panel) const { return outputs_ + panel * kSide * count_ * columns_; }

    void multiply(int64_t panel, int64_t point) const {
      const contraction::Layout& layout = w_.layout_;
      const char* const panels = w_.filter_ + feature(panel) / contraction::kPanel * w_.panels_.bytes() + point * s_.channels * layout.line;
      const int64_t offset = point % kSide * count_ * w_.row_;
      float* const sums = sums_ + point % kSide * count_ * columns_;
      for (int64_t k = 0; k < s_.channels; k += kInner) {
        const int64_t steps = std::min(kInner, s_.channels - k);
        const char* const at = panels + k * layout.line;
        const contraction::Tile all{rows_.data(), nullptr, count_, (offset + k) * int64_t(sizeof(float)), 1, steps, false,
                                    columns(panel), at, layout, at + steps * layout.line, steps, 0};
        contraction::for_tiles(w_.products_, all, count_, [&](const contraction::Tile& tile, int64_t begin, int64_t end) {
          w_.products_.multiply(tile, end - begin, sums + begin * columns_, k == 0);
        });
      }
    }

    const Winograd& w_;
    const Sizes& s_;
    const int64_t columns_, first_, count_;
    const Scratch scratch_;
    float *const points_, *const sums_, *const outputs_;
    std::vector<const char*> rows_;
    std::vector<const float*> pixels_;
  };

  const Forward f_;
  const Sizes s_;
  const Kernels& loops_;
  const int64_t tile_columns_;
  const contraction::Products& products_;
  const contraction::Panels panels_;
  const contraction::Layout layout_;
  const int64_t row_;
  const char* filter_;
  const std::vector<float> zeros_;
  const epilogue::Tiles epilogue_;
};

}  // namespace

bool fits(const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y) {
  const Shape ones(2, 1);
  return x.dtype == DType::F32 && y.dtype == DType::F32 && g.groups == 1 && g.strides == ones && g.dilation == ones &&
                    g.lhs_dilation == ones && w.shape[g.rhs_spec[2]] == 3 && w.shape[g.rhs_spec[3]] == 3 &&
                    is_channels_last(g.lhs_spec) && is_channels_last(g.out_spec);
}

bool takes(const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y) {
  if (!fits(g, x, w, y) || !contracted::fits(g, w)) return false;  // which computes what is not finite
  const Sizes s(g, x, w, y);
  // A transformed filter is 16/9 of itself, written and read again: a few tiles do not make up for a large one.
  constexpr int64_t kFewestFeatures = 32, kFewestTiles = 48, kMostProductsForATile = 1400;
  return std::min(s.channels, s.features) >= kFewestFeatures && s.tiles >= kFewestTiles &&
         s.channels * s.features <= kMostProductsForATile * s.tiles;
}

bool forward(const Forward& f, const char* filter) {
  Winograd winograd(f, filter);
  return filter ? winograd.run() : winograd.run(false);
}

bool takes_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  return takes(geometry.adjoint(w), g, w, dx);
}

bool data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  return Winograd({geometry.adjoint(w), g, w, {dx}}, nullptr).run(true);
}

}  // namespace jaxfuse::conv::winograd
