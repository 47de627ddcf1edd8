// The gradient of a filter by Winograd's F(2×2), read backwards: dw = Gᵀ·[Σ over tiles of (Bᵀ·d·B) ⊙ (A·g·Aᵀ)]·G. A task has some
// channels, some features and some tiles. It takes one line of the 4×4 points after the other: so a line's sums, and what is
// transformed for them, stay in the second-level cache.
#include <algorithm>
#include <atomic>
#include <vector>

#include "conv_winograd.h"
#include "conv_winograd_tiles.h"
#include "parallel.h"
#include "scratch.h"

namespace jaxfuse::conv::winograd {
namespace {

constexpr int64_t kTaps = 9;

// How the sums are cut, by the shapes alone, so that they repeat bit for bit.
struct Cut {
  static constexpr int64_t kChannels = 64, kFeatures = 128, kTiles = 64, kFewTasks = 8, kLongest = 16, kVector = 16;
  int64_t channels, features;  // of a task: whole vectors
  int64_t channel_parts, feature_parts;
  int64_t tiles, blocks;    // of a block, and how many blocks there are
  int64_t parts_of_blocks;  // each with sums of its own

  explicit Cut(const Sizes& s)
      : channels(padded(even(s.channels, kChannels), kVector)), features(padded(even(s.features, kFeatures), kVector)),
        channel_parts(parts(s.channels, channels)), feature_parts(parts(s.features, features)), tiles(even(s.tiles, kTiles)),
        blocks(parts(s.tiles, tiles)),
        parts_of_blocks(std::min(blocks, std::max(parts(kFewTasks, channel_parts * feature_parts), parts(blocks, kLongest)))) {}
};

class Task {
 public:
  Task(const Sizes& s, const Cut& cut, int64_t number, const Tensor& x, const Tensor& g)
      : s_(s), cut_(cut), loops_(kernels()), channel_(number % cut.channel_parts * cut.channels),
        channels_(std::min(cut.channels, s.channels - channel_)), feature_(number / cut.channel_parts * cut.features),
        features_(std::min(cut.features, s.features - feature_)), inputs_(x.as<float>() + channel_), outputs_(g.as<float>() + feature_),
        zeros_(std::max(cut.channels, cut.features)), scratch_((x_point() + g_point() + sums_point()) * kSide * sizeof(float)),
        x_(scratch_.as<float>()), g_(x_ + kSide * x_point()), sums_(g_ + kSide * g_point()) {}

  // The sums over blocks [begin, end), to their places of the whole filter, which is [tap][channel][feature]; whether they are finite.
  bool run(int64_t begin, int64_t end, float* filter) const {
    const int64_t tap = s_.channels * s_.features;
    float* const taps = filter + channel_ * s_.features + feature_;
    for (int64_t row = 0; row < kTaps * channels_; ++row) {
      std::fill_n(taps + row / channels_ * tap + row % channels_ * s_.features, features_, 0.0f);
    }
    bool finite = true;
    for (int64_t line = 0; line < kSide; ++line) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * cut_.tiles, count = std::min(cut_.tiles, s_.tiles - first);
        transform(line, first, count);
        multiply(count, block == begin);
      }
      for (int64_t c = 0; c < channels_; ++c) {
        finite &= loops_.filter.add_taps(sums_ + c * cut_.features, sums_point(), line, features_, taps + c * s_.features, tap);
      }
    }
    return finite;
  }

 private:
  // Floats of one point of what is transformed, and of the sums.
  int64_t x_point() const { return cut_.tiles * cut_.channels; }
  int64_t g_point() const { return cut_.tiles * cut_.features; }
  int64_t sums_point() const { return cut_.channels * cut_.features; }

  void transform(int64_t line, int64_t first, int64_t count) const {
    const float* pixels[kPoints];
    for (int64_t t = 0; t < count; ++t) {
      const Position at(s_, first + t);
      at.find_inputs(s_, inputs_, zeros_.data(), pixels);
      loops_.transform_input(pixels, line, channels_, x_ + t * cut_.channels, x_point());
      at.find_outputs(s_, outputs_, zeros_.data(), pixels);
      loops_.filter.transform_gradient(pixels, line, features_, g_ + t * cut_.features, g_point());
    }
  }

  void multiply(int64_t count, bool first) const {
    const int64_t rows = parts(channels_, loops_.filter.rows), one_line = 0;
    for (int64_t point = 0; point < kSide; ++point) {
      for (int64_t n = 0; n < features_; n += loops_.filter.columns) {
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t begin = i * channels_ / rows, end = (i + 1) * channels_ / rows;
          loops_.filter.multiply({x_ + point * x_point() + begin, g_ + point * g_point() + n, &one_line, 1, count, cut_.channels, cut_.features},
                          end - begin, features_ - n, sums_ + point * sums_point() + begin * cut_.features + n, cut_.features, first);
        }
      }
    }
  }

  const Sizes& s_;
  const Cut& cut_;
  const Kernels& loops_;
  const int64_t channel_, channels_, feature_, features_;
  const float *const inputs_, *const outputs_;
  const std::vector<float> zeros_;
  const Scratch scratch_;
  float *const x_, *const g_, *const sums_;
};

// Adds the sums of further parts to those of the first.
void add_parts(const Tensor& dw, int64_t row, const float* sums, int64_t count) {
  float* const to = dw.as<float>();
  parallel_for(dw.size() / row, [&](int64_t i) {
    for (int64_t part = 0; part < count; ++part) {
      const float* const own = sums + part * dw.size();
      for (int64_t k = i * row; k < (i + 1) * row; ++k) to[k] += own[k];
    }
  });
}

}  // namespace

bool takes_filter_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  if (!fits(geometry, x, dw, g) || !is_features_last(geometry.rhs_spec) || geometry.filter_features) return false;
  // Of few channels a vector would be all but empty; the sums of few tiles are short beside the transforms (benchmarks/README.md).
  constexpr int64_t kFewestFeatures = 24, kFewestTiles = 48, kMostProductsForATile = 4500;
  const Sizes s(geometry, x, dw, g);
  return std::min(s.channels, s.features) >= kFewestFeatures && s.tiles >= kFewestTiles &&
         s.channels * s.features <= kMostProductsForATile * s.tiles;
}

bool filter_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const Sizes s(geometry, x, dw, g);
  const Cut cut(s);
  const int64_t count = cut.parts_of_blocks, tasks = cut.channel_parts * cut.feature_parts;
  const Scratch sums((count - 1) * dw.bytes());
  std::atomic<bool> finite{true};
  parallel_for(tasks * count, [&](int64_t i) {
    const int64_t part = i / tasks;
    float* const filter = part == 0 ? dw.as<float>() : sums.as<float>() + (part - 1) * dw.size();
    if (!Task(s, cut, i % tasks, x, g).run(part * cut.blocks / count, (part + 1) * cut.blocks / count, filter)) finite = false;
  });
  if (finite && count > 1) add_parts(dw, s.channels * s.features, sums.as<float>(), count - 1);
  return finite;
}

}  // namespace jaxfuse::conv::winograd
