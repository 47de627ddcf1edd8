#include "conv_contraction.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "contraction.h"
#include "conv_flat_images.h"
#include "conv_merged_lines.h"
#include "conv_phases.h"
#include "conv_pixels.h"
#include "epilogue.h"
#include "onednn/onednn.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::conv::contracted {
namespace {

constexpr int kAxes = 3;  // missing ones are in front, of extent 1

// The rows of one group's problem: the outputs of a phase of every axis.
struct Rows {
  const char *x, *zeros;
  int64_t images, pixel;  // bytes from pixel to pixel
  Phase axes[kAxes];

  int64_t count() const { return images * axes[0].count * axes[1].count * axes[2].count; }

  // Where row m is, counted in the phase's outputs.
  struct Place {
    int64_t image, at[kAxes];
  };
  Place place(int64_t m) const {
    const int64_t line = m / axes[2].count, plane = line / axes[1].count;
    return {plane / axes[0].count, {plane % axes[0].count, line % axes[1].count, m % axes[2].count}};
  }

  void point(int64_t first, int64_t count, const char** to, int64_t step) const {
    for (int64_t m = first, run; m < first + count; m += run) {
      const Place p = place(m);
      run = std::min(first + count - m, axes[2].count - p.at[2]);
      const char** tap_to = to + (m - first);
      for (const Phase::Tap& plane : axes[0].taps) {
        for (const Phase::Tap& row : axes[1].taps) {
          const int64_t h = p.at[0] * axes[0].stride + plane.shift, i = p.at[1] * axes[1].stride + row.shift;
          const bool inside = h >= 0 && h < axes[0].inputs && i >= 0 && i < axes[1].inputs;
          const int64_t line = ((p.image * axes[0].inputs + h) * axes[1].inputs + i) * axes[2].inputs;
          for (const Phase::Tap& column : axes[2].taps) {
            inside ? point_line(line, p.at[2], run, column.shift, tap_to) : (void)std::fill_n(tap_to, run, zeros);
            tap_to += step;
          }
        }
      }
    }
  }

  // Outputs [j, j + run) of a line of inputs.
  void point_line(int64_t line, int64_t j, int64_t run, int64_t shift, const char** to) const {
    const int64_t stride = axes[2].stride, inputs = axes[2].inputs, begin = j * stride + shift;
    const int64_t before = begin < 0 ? std::min(run, (-begin + stride - 1) / stride) : 0;
    const int64_t end = std::clamp<int64_t>((inputs - begin + stride - 1) / stride, before, run);
    std::fill_n(to, before, zeros);
    const char* at = x + (line + begin + before * stride) * pixel;
    for (int64_t i = before; i < end; ++i, at += stride * pixel) to[i] = at;
    std::fill_n(to + end, run - end, zeros);
  }

  bool meets_padding() const { return std::any_of(std::begin(axes), std::end(axes), [](const Phase& a) { return a.meets_padding(); }); }
};

}  // namespace

class Convolution {
 public:
  // `flipped`: by the filter read from its last tap to its first. `panels`: or by the filter that is packed there. `int8`: x is u8.
  // `padded`: taps over padding multiply zeros, which is faster and wrong of infinities.
  Convolution(const Forward& f, bool flipped, const char* panels = nullptr, const Int8* int8 = nullptr, bool padded = true)
      : f_(f), panels_(panels), int8_(int8), groups_(f.geometry.groups), inner_(f.geometry.inputs_per_group(f.w)), features_(f.y().shape[f.geometry.out_spec[1]]), columns_(features_ / groups_), flipped_(flipped),
        zeros_(inner_ * int64_t(ffi::ByteWidth(f.x.dtype)) + int64_t(sizeof(float)), int8 ? char(int8->zero) : 0),
        epilogue_(f.epilogue, {f.y().size() / features_, features_}), images_(f.x.shape[0]) {
    const Geometry& g = f.geometry;
    const size_t n = g.spatial_rank();
    for (size_t i = 0; i < n; ++i) {
      axes_[kAxes - n + i] = {f.x.shape[i + 1], f.y().shape[i + 1],    f.w.shape[g.rhs_spec[i + 2]], g.strides[i],
                              g.dilation[i],    g.lhs_dilation[i], g.padding_low[i]};
    }
    if (std::all_of(std::begin(axes_), std::end(axes_), [](const Axis& a) { return a.is_one_tap(); })) {
      const int64_t pixels = images_ * axes_[0].outputs * axes_[1].outputs * axes_[2].outputs;
      axes_[0] = axes_[1] = {}, images_ = 1;
      axes_[2].inputs = axes_[2].outputs = pixels;
    }
    add_problems(padded);
    plans_.emplace(problems_);
  }

  // From now on the same of other arrays, by a packed filter.
  void point_to(const Forward& f, const char* panels) {
    epilogue_.point_to(f.epilogue);
    for (Rows& rows : rows_) rows.x = f.x.as<char>();
    for (contraction::Problem& problem : problems_) problem.filter.panels = panels;
  }

  // Whether what it wrote is right: no infinity or NaN of the filter met padding, which x may have of its own too.
  bool run(bool x_has_padding = false) const {
    const bool finite = plans_->multiply([&](const auto& b) { finish(b); }, [&](const auto& b) { expect(b); });
    return finite || (!x_has_padding && std::none_of(rows_.begin(), rows_.end(), [](const Rows& r) { return r.meets_padding(); }));
  }

 private:
  void add_problems(bool padded) {
    const Geometry& g = f_.geometry;
    const Shape strides = g.filter_strides(f_.w);
    const int64_t x_bytes = ffi::ByteWidth(f_.x.dtype), pixel = f_.x.shape[g.lhs_spec[1]] * x_bytes;
    const int64_t inner_step = strides[g.filter_swapped ? 0 : 1], column_step = strides[g.filter_swapped ? 1 : 0];
    const int64_t group_step = g.filter_swapped ? inner_ * inner_step : columns_ * column_step;
    const std::vector<Phase> phases[kAxes] = {axes_[0].phases(padded), axes_[1].phases(padded), axes_[2].phases(padded)};
    rows_.reserve(groups_ * phases[0].size() * phases[1].size() * phases[2].size());
    for (int64_t group = 0; group < groups_; ++group) {
      for (const Phase& plane : phases[0]) {
        for (const Phase& row : phases[1]) {
          for (const Phase& column : phases[2]) {
            rows_.push_back({f_.x.as<char>() + group * inner_ * x_bytes, zeros_.data(), images_, pixel, {plane, row, column}});
            const Rows& rows = rows_.back();
            problems_.push_back({rows.count(), inner_, columns_, f_.x.dtype,
                                 {f_.w.as<char>() + group * group_step * int64_t(ffi::ByteWidth(f_.w.dtype)), f_.w.dtype,
                                  taps(rows, strides), inner_step, column_step, panels_, int8_ && int8_->narrow},
                                 [&rows](int64_t first, int64_t count, const char** to, int64_t step) { rows.point(first, count, to, step); }});
          }
        }
      }
    }
  }

  // Where the taps of a phase begin in the filter.
  std::vector<int64_t> taps(const Rows& rows, const Shape& strides) const {
    const size_t n = f_.geometry.spatial_rank();
    const auto offset = [&](size_t axis, int64_t number) {
      if (axis + n < kAxes) return int64_t(0);
      return (flipped_ ? axes_[axis].taps - 1 - number : number) * strides[axis + n - kAxes + 2];
    };
    std::vector<int64_t> taps;
    for (const Phase::Tap& a : rows.axes[0].taps) {
      for (const Phase::Tap& b : rows.axes[1].taps) {
        for (const Phase::Tap& c : rows.axes[2].taps) taps.push_back(offset(0, a.number) + offset(1, b.number) + offset(2, c.number));
      }
    }
    return taps;
  }

  bool rows_are_pixels() const { return int64_t(rows_.size()) == groups_; }  // of y: there is one phase
  int64_t column(const contraction::Block& b) const { return int64_t(b.problem) / (int64_t(rows_.size()) / groups_) * columns_ + b.column; }
  epilogue::Tile tile(const contraction::Block& b, int64_t row, int64_t pixel) const {
    return epilogue_.tile(b.sums + row * b.stride, DType::F32, b.stride, pixel * features_ + column(b), column(b), b.columns);
  }

  void expect(const contraction::Block& b) const {
    if (rows_are_pixels()) epilogue::fetch(tile(b, 0, b.row), b.rows);
  }

  // The outputs of a block: at once where the phase's rows are the pixels of y, else line by line.
  void finish(const contraction::Block& b) const {
    const Rows& rows = rows_[b.problem];
    if (int8_) contraction::kernels().to_floats(b.sums, b.rows, b.stride, b.columns, int8_->offsets + column(b));
    for (int64_t row = 0, run; row < b.rows; row += run) {
      const Rows::Place p = rows.place(b.row + row);
      run = rows_are_pixels() ? b.rows : std::min(b.rows - row, rows.axes[2].count - p.at[2]);
      int64_t pixel = p.image;
      for (int axis = 0; axis < kAxes; ++axis) {
        pixel = pixel * axes_[axis].outputs + rows.axes[axis].first + p.at[axis] * rows.axes[axis].step;
      }
      epilogue::Tile tile = this->tile(b, row, pixel);
      if (!rows_are_pixels()) tile.stride *= rows.axes[2].step;  // a phase's pixels lie apart, unless it has one
      epilogue::kernels().apply(tile, 0, run);
    }
  }

  const Forward f_;
  const char* const panels_;
  const Int8* const int8_;
  const int64_t groups_, inner_, features_, columns_;
  const bool flipped_;
  const std::vector<char> zeros_;  // a pixel of them, and the rest of a step
  epilogue::Tiles epilogue_;
  int64_t images_;
  Axis axes_[kAxes];  // where each has one tap, all pixels are one line
  std::vector<Rows> rows_;
  std::vector<contraction::Problem> problems_;
  std::optional<contraction::Plans> plans_;
};

bool fits(const Geometry& g, const Tensor& w) {
  const Shape strides = g.filter_strides(w);
  return is_channels_last(g.lhs_spec) && is_channels_last(g.out_spec) && (strides[0] == 1 || strides[1] == 1);
}

// Whether oneDNN is slower, as measured on Zen 5 and, with AVX2, on Zen 3 (benchmarks/README.md).
bool is_large(const Tensor& w, int64_t pixels) {  // few pixels meet each element that it reorders
  constexpr int64_t kElementsForPixel = 600;
  return w.size() >= kElementsForPixel * pixels;
}
bool is_read_once(const Tensor& x, int64_t channels, int64_t features) {  // from memory, for few features: its lines are fetched before
  constexpr int64_t kFewestBytes = 12 << 20, kFewestChannels = 128;
  return int64_t(x.bytes()) >= kFewestBytes && channels >= kFewestChannels && 2 * features <= channels;
}

bool takes(const Forward& f) {
  const Geometry& g = f.geometry;
  const Tensor &x = f.x, &w = f.w, &y = f.y();
  if (!fits(g, w) || y.size() == 0) return false;
  if (contraction::always() || !onednn::is_loaded() || ByPixels::takes_unpacked(f)) return true;
  constexpr int64_t kFewestChannels = 16;  // with AVX-512 of strides
  const int64_t channels = x.shape[g.lhs_spec[1]], features = y.shape[g.out_spec[1]], pixels = y.size() / features;
  if (g.groups > 1) return false;
  if (simd_level() == SimdLevel::avx2) {
    if (x.dtype != DType::F32 || channels < kFewestChannels) return false;
    return is_large(w, pixels) || w.size() * std::min(pixels, x.size() / channels) >= kManyProducts;
  }
  if (!contraction::has_bf16()) return false;
  if (is_large(w, pixels)) return true;
  return x.dtype == DType::F32 && ((g.strided() && channels >= kFewestChannels) || is_read_once(x, channels, features));
}

// By f's filter, or by the one that is packed at `panels`, which is finite. False where an infinity or a NaN of it met padding.
bool convolve(Forward f, const char* panels, const Int8* int8) {
  if (f.x.size() == 0) {
    epilogue::apply(f.epilogue, f.geometry.out_spec[1], nullptr, f.y().dtype);
    return true;
  }
  if (FlatImages::takes(f)) return FlatImages(f, panels, int8).run();
  if (!merges_lines(f.geometry, f.w)) return Convolution(f, f.geometry.transposed(), panels, int8).run();
  int64_t &low = f.geometry.padding_low.back(), &high = f.geometry.padding_high.back();
  const bool has_padding = low > 0 || high > 0;
  const int64_t lines = f.x.size() / f.x.shape[f.x.shape.size() - 2];
  const int64_t elements = lines * (low + high) + f.x.size();
  const Scratch padded(has_padding ? elements * int64_t(ffi::ByteWidth(f.x.dtype)) + contraction::kStepBytes : 0);
  if (has_padding) f.x = padded_lines(f.x, low, high, int8 ? char(int8->zero) : 0, padded.data());
  f.w = with_merged_lines(f.geometry, f.w);
  low = high = 0;
  return Convolution(f, false, panels, int8).run(has_padding);
}

void forward(const Forward& f) {
  if (ByPixels::takes_unpacked(f)) return ByPixels::forward(f);
  if (!convolve(f, nullptr, nullptr)) Convolution(f, f.geometry.transposed(), nullptr, nullptr, false).run();
}

void check_packed(const Call& call, const Geometry& g, const Tensor& w) {
  if (g.groups != 1 || g.transposed() || !is_channels_last(g.lhs_spec) || !is_channels_last(g.out_spec)) {
    call.refuse("the convolution is transposed, grouped or not channels last: its filter cannot be packed");
  }
  if (w.shape.size() != g.spatial_rank() + 2) {
    call.refuse("w has shape ", to_string(w.shape), ", expected ", g.spatial_rank() + 2, " dimensions");
  }
  if (w.size() == 0) call.refuse("w has shape ", to_string(w.shape), ", expected no empty dimension");
}

ByPanels::ByPanels() = default;
ByPanels::~ByPanels() = default;

void ByPanels::run(const Forward& f, const char* panels, const Int8* int8) {
  if (f.x.size() == 0 || merges_lines(f.geometry, f.w)) return (void)convolve(f, panels, int8);
  if (threads_ != max_threads()) {
    threads_ = max_threads();
    if (FlatImages::takes(f)) {
      flat_ = std::make_unique<FlatImages>(f, panels, int8);
    } else {
      convolution_ = std::make_unique<Convolution>(f, false, panels, int8);
    }
  } else {
    flat_ ? flat_->point_to(f, panels) : convolution_->point_to(f, panels);
  }
  flat_ ? flat_->run() : convolution_->run();
}

contraction::Panels panels(const Geometry& g, const Tensor& w, DType dtype) {
  const Tensor merged = with_merged_lines(g, w);
  return {g.inputs_per_group(merged), merged.shape[g.rhs_spec[g.filter_swapped]], g.taps(merged), dtype};
}

contraction::Filter filter(const Geometry& g, const Tensor& w) {
  const Tensor merged = with_merged_lines(g, w);
  const Shape strides = g.filter_strides(merged);
  contraction::Filter f{w.data, w.dtype, {0}, strides[!g.filter_swapped], strides[g.filter_swapped]};
  for (size_t i = 0; i < g.spatial_rank(); ++i) {
    std::vector<int64_t> taps;
    for (const int64_t before : f.taps) {
      for (int64_t tap = 0; tap < merged.shape[g.rhs_spec[i + 2]]; ++tap) taps.push_back(before + tap * strides[i + 2]);
    }
    f.taps = taps;
  }
  return f;
}

bool takes_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  return takes({geometry.adjoint(w), g, w, {dx}});
}

void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  const Forward f{geometry.adjoint(w), g, w, {dx}};
  if (ByPixels::takes_unpacked(f)) return ByPixels::forward(f);
  if (!Convolution(f, true).run()) Convolution(f, true, nullptr, nullptr, false).run();
}

}  // namespace jaxfuse::conv::contracted
