// A task takes some tiles, all of whose channels it transforms into memory of its own. Then, a panel of features after the other:
// for each of the 16 points a product of these tiles and of the transformed filter, and the outputs made of the 16. Where there are
// few tiles, and panels for all threads, a task takes all tiles and one panel.
#include "conv_winograd.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "contraction.h"
#include "conv_contraction.h"
#include "conv_winograd_tiles.h"
#include "parallel.h"
#include "scratch.h"

namespace jaxfuse::conv::winograd {
namespace {

constexpr int64_t kInner = 128;            // products of a sum in f32, which is then added to those before
constexpr int64_t kTileFloats = 96 << 10;  // of transformed tiles that a task has: they stay in the second-level cache
constexpr int64_t kFewTileFloats = 256 << 10;  // so few that all of them stay there: then a task reads a part of the filter only
constexpr int64_t kPadding = 16;           // between their rows: a power of two would meet in the same lines of the cache

class Winograd {
 public:
  // By the filter that is transformed and packed, if it is given.
  Winograd(const Forward& f, const char* filter)
      : f_(f), s_(f.geometry, f.x, f.w, f.y()), loops_(kernels()), products_(contraction::kernels()),
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
    const bool has_tasks = parts(s_.features, products_.columns) >= max_threads();
    return has_tasks && s_.tiles * row_ * kPoints <= kFewTileFloats ? run_by_features() : run_by_tiles();
  }

 private:
  void transform_filter(bool flipped, char* to) const {
    const Shape strides = f_.geometry.filter_strides(f_.w);
    constexpr int64_t kStep = 32;  // channels
    const int64_t steps = parts(s_.channels, kStep), columns = products_.columns, point = s_.channels * columns;
    parallel_for(parts(s_.features, columns) * steps, [&](int64_t i) {
      const int64_t feature = i / steps * columns, channel = i % steps * kStep;
      const float* w = f_.w.as<float>() + feature * strides[0] + channel * strides[1];
      Filter filter{w, strides[2], strides[3], strides[1], strides[0]};
      if (flipped) filter = {w + 2 * (strides[2] + strides[3]), -strides[2], -strides[3], strides[1], strides[0]};
      loops_.transform_filter(filter, std::min(kStep, s_.channels - channel), s_.features - feature,
                              reinterpret_cast<float*>(to) + feature * s_.channels * kPoints + channel * columns, columns, point);
    });
  }

  // Every task has tiles of its own, and reads the whole filter.
  bool run_by_tiles() const {
    const int64_t most = std::max(products_.rows, kTileFloats / kPoints / row_ / products_.rows * products_.rows);
    const int64_t tasks = std::max(parts(s_.tiles, most), std::min<int64_t>(max_threads(), parts(s_.tiles, products_.rows)));
    const int64_t step = padded(parts(s_.tiles, tasks), products_.rows);
    std::atomic<bool> finite{true};
    parallel_for(parts(s_.tiles, step), [&](int64_t task) {
      const int64_t first = task * step, count = std::min(step, s_.tiles - first);
      const Scratch scratch(kPoints * count * row_ * sizeof(float));
      float* const tiles = scratch.as<float>();
      for (int64_t t = 0; t < count; ++t) transform_input(first + t, tiles + t * row_, count * row_);
      const Part part(*this, first, count, tiles);
      for (int64_t feature = 0; feature < s_.features; feature += products_.columns) {
        if (!run(part, feature)) finite = false;
      }
    });
    return finite;
  }

  // Every task has some features, and reads all tiles.
  bool run_by_features() const {
    const Scratch scratch(kPoints * s_.tiles * row_ * sizeof(float));
    float* const tiles = scratch.as<float>();
    parallel_for(s_.tiles, [&](int64_t t) { transform_input(t, tiles + t * row_, s_.tiles * row_); });
    std::atomic<bool> finite{true};
    parallel_for(parts(s_.features, products_.columns), [&](int64_t task) {
      if (!run(Part(*this, 0, s_.tiles, tiles), task * products_.columns)) finite = false;
    });
    return finite;
  }

  // Some transformed tiles, and memory for products and outputs of theirs.
  struct Part {
    int64_t first, count, products;
    Scratch scratch;
    float *sums, *z;
    std::vector<const char*> rows;

    Part(const Winograd& w, int64_t first, int64_t count, const float* tiles)
        : first(first), count(count), products(count * w.products_.columns), scratch((kPoints + 2 * 2) * products * sizeof(float)),
          sums(scratch.as<float>()), z(sums + kPoints * products), rows(count) {
      for (int64_t t = 0; t < count; ++t) rows[t] = reinterpret_cast<const char*>(tiles + t * w.row_);
    }
  };

  // As many features of them as a tile of products has.
  bool run(const Part& part, int64_t feature) const {
    const char* panels = filter_ + feature / contraction::kPanel * panels_.bytes();
    for (int64_t p = 0; p < kPoints; ++p, panels += s_.channels * layout_.line) {
      multiply(part.rows.data(), part.count, feature, p * part.count * row_, panels, part.sums + p * part.products);
    }
    return finish(part.first, part.count, feature, part.sums, part.z);
  }

  void transform_input(int64_t tile, float* to, int64_t point) const {
    const float* pixels[kPoints];
    Position(s_, tile).find_inputs(s_, f_.x.as<float>(), zeros_.data(), pixels);
    loops_.transform_input(pixels, s_.channels, to, point);
  }

  // Of a tile of products from this feature on; nothing writes the others.
  int64_t columns(int64_t feature) const { return std::min(products_.columns, s_.features - feature); }

  // The products of one point, whose transformed pixels are `offset` floats behind the rows' beginnings.
  void multiply(const char* const* rows, int64_t count, int64_t feature, int64_t offset, const char* panels, float* sums) const {
    const int64_t tiles = parts(count, products_.rows);
    for (int64_t k = 0; k < s_.channels; k += kInner) {
      const int64_t steps = std::min(kInner, s_.channels - k);
      const char* const at = panels + k * layout_.line;
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t begin = i * count / tiles, end = (i + 1) * count / tiles, fetched = i * steps / tiles;
        const contraction::Tile tile{rows + begin, nullptr, count, (offset + k) * int64_t(sizeof(float)), 1, steps, false, columns(feature), at,
                                     layout_, at + (steps + fetched) * layout_.line, (i + 1) * steps / tiles - fetched};
        products_.multiply_f32(tile, end - begin, sums + begin * products_.columns, k == 0);
      }
    }
  }

  // The outputs of these tiles, line by line of tiles.
  bool finish(int64_t first, int64_t count, int64_t feature, const float* sums, float* z) const {
    bool finite = true;
    for (int64_t t = 0, beside; t < count; t += beside) {
      const Position at(s_, first + t);
      beside = std::min(count - t, s_.per_line - at.column / 2);
      float* const lines[2] = {z, z + 2 * beside * products_.columns};
      finite &= loops_.transform_output({sums + t * products_.columns, count * products_.columns, products_.columns, beside, columns(feature),
                                         {lines[0], lines[1]}, products_.columns});
      for (int64_t line = 0; line < std::min<int64_t>(2, s_.out_height - at.line); ++line) {
        const int64_t pixel = (at.image * s_.out_height + at.line + line) * s_.out_width + at.column;
        const int64_t pixels = std::min(2 * beside, s_.out_width - at.column);
        const int64_t offset = pixel * s_.features + feature;
        epilogue::kernels().apply(epilogue_.tile(lines[line], DType::F32, products_.columns, offset, feature, columns(feature)), 0, pixels);
      }
    }
    return finite;
  }

  const Forward f_;
  const Sizes s_;
  const Kernels& loops_;
  const contraction::Kernels& products_;
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
