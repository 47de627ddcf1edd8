#include "conv_pixels.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "conv_merged_lines.h"
#include "cut.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::conv {
namespace {

constexpr int64_t kRowBytes = 384 << 10;  // of x, which stay in the second-level cache while they meet one panel after the other
constexpr int64_t kFewestRows = 48;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Blocks of whole lines by parts of the groups of columns.
struct Cut {
  int64_t blocks, column_parts;

  Cut(int64_t lines, int64_t width, int64_t pixel, int64_t groups, int64_t wanted) {
    blocks = parts(lines * width * pixel, kRowBytes);
    column_parts = std::min(groups, parts(wanted, blocks));
    if (blocks * column_parts >= wanted) return;
    const int64_t most = parts(lines, parts(kFewestRows, width));
    blocks = std::max(blocks, std::min(parts(wanted, column_parts), most));
  }
};

// Panels whose channels are times their factors.
void scale(const char* panels, int64_t count, int64_t channels, const float* factors, char* to) {
  const float* from = reinterpret_cast<const float*>(panels);
  float* scaled = reinterpret_cast<float*>(to);
  for (int64_t i = 0; i < count * channels; ++i, from += contraction::kPanel, scaled += contraction::kPanel) {
    for (int64_t n = 0; n < contraction::kPanel; ++n) scaled[n] = from[n] * factors[i % channels];
  }
}

}  // namespace

struct ByPixels::Part {
  int64_t row, rows, first, last;  // columns [first, last)
};

bool ByPixels::takes_factors(const Forward& f) {
  const int64_t features = f.y().shape.back(), pixels = f.y().size() / f.x.shape[0] / features;
  return f.x.dtype == DType::F32 && f.geometry.is_pointwise(f.w) && features < pixels;
}

bool ByPixels::takes(const Forward& f, bool gated) {
  const Geometry& g = f.geometry;
  const Epilogue& e = f.epilogue;
  const int64_t features = e.y.shape.back();
  const bool is_int8 = f.x.dtype == DType::U8;  // whose sums are f32 or bf16 by a scale
  if (f.x.dtype != DType::F32 && has_amx()) return false;  // whose registers multiply rows
  if (simd_level() == SimdLevel::portable || e.z || e.residual_last || f.x.size() == 0) return false;
  if (is_int8 ? simd_level() != SimdLevel::avx2 : e.y.dtype != f.x.dtype) return false;
  if (e.y.dtype != DType::F32 && !limits_of(e.activation, e.parameters)) return false;
  const contraction::Panels panels = contracted::panels(g, f.w, f.x.dtype);
  if (e.y.size() < kFewestRows * features) return false;
  const bool is_long = panels.taps * panels.steps() > contraction::kMostPixelSteps;
  if (gated && takes_factors(f)) return !(is_long && e.scale);  // x is not copied
  // Intel's CPUs compute many features sooner by the contraction's tiles, which load less for each product.
  const bool is_wide = simd_level() == SimdLevel::avx512 && is_intel() && features > 2 * contraction::kernels().pixel_columns;
  if (is_long || is_wide) return false;
  if (!g.is_pointwise(f.w)) return g.spatial_rank() == 2 && contracted::merges_lines(g, f.w);
  // Of a large x rows should not be read again for a few columns more; with AVX-512 a y that the caches do not hold is written sooner by
  // wider tiles.
  constexpr int64_t kMostOfX = 1 << 20, kMostOfY = 4 << 20;
  const bool reads_little = features <= contraction::kernels().pixel_columns || (f.x.dtype != DType::BF16 && int64_t(f.x.bytes()) <= kMostOfX);
  const bool writes_much = simd_level() != SimdLevel::avx2 && int64_t(e.y.bytes()) > kMostOfY;
  return (reads_little || features >= f.x.shape.back()) && !writes_much;
}

// Measured with AVX2 (benchmarks/README.md).
bool ByPixels::takes_unpacked(const Forward& f) {
  constexpr int64_t kFewest = 16;  // channels, and features, of which fewer leave most of a tile empty
  const Geometry& g = f.geometry;
  if (simd_level() != SimdLevel::avx2 || f.x.dtype != DType::F32 || f.adds || g.groups > 1 || !g.is_pointwise(f.w)) return false;
  return std::min(f.x.shape.back(), f.y().shape.back()) >= kFewest && takes(f, false);
}

void ByPixels::forward(const Forward& f) {
  const contraction::Panels panels = contracted::panels(f.geometry, f.w, f.x.dtype);
  const Scratch packed(panels.all_bytes());
  contraction::pack(contracted::filter(f.geometry, f.w), panels, packed.data());
  ByPixels(f).run(f, packed.data());
}

ByPixels::Rows ByPixels::rows_of(const Forward& f) {
  const int64_t channels = f.x.shape.back() * int64_t(ffi::ByteWidth(f.x.dtype)), outputs = f.y().size() / f.y().shape.back();
  if (f.geometry.is_pointwise(f.w)) {
    return {false, 1, outputs, outputs, 0, 0, 0, 0, channels, channels, channels, channels, 1, 0};
  }
  const Geometry& g = f.geometry;
  const Shape &low = g.padding_low, &high = g.padding_high;
  const int64_t line = (low[1] + f.x.shape[2] + high[1]) * channels;
  return {true, f.y().shape[2], f.y().shape[1], low[0] + f.x.shape[1] + high[0], low[1], high[1], low[0], high[0],
          channels, g.strides[1] * channels, line, g.strides[0] * line, f.w.shape[g.rhs_spec[2]], g.dilation[0] * line};
}

ByPixels::ByPixels(const Forward& f)
    : panels_(contracted::panels(f.geometry, f.w, f.x.dtype)), limits_(limits_of(f.epilogue.activation, f.epilogue.parameters)),
      in_(rows_of(f)), images_(f.x.shape[0]), rows_(f.y().size() / f.y().shape.back()), features_(f.y().shape.back()),
      epilogue_(f.epilogue, {rows_, features_}) {}

// x with zeros around each image.
void ByPixels::pad(const Tensor& x, char zero, char* to) const {
  const int64_t height = x.shape[1], line = x.shape[2] * in_.channels, before = in_.low * in_.channels;
  parallel_for(x.shape[0] * in_.padded_lines, [&](int64_t i) {
    const int64_t at = i % in_.padded_lines - in_.above;
    char* const copy = to + i * in_.line;
    if (at < 0 || at >= height) return (void)std::memset(copy, zero, in_.line);
    std::memset(copy, zero, before);
    std::memcpy(copy + before, x.as<char>() + (i / in_.padded_lines * height + at) * line, line);
    std::memset(copy + before + line, zero, in_.high * in_.channels);
  });
}

// By the panels of the part's columns. Of lines that follow one another without a gap all rows at once.
void ByPixels::multiply(const Forward& f, const char* x, const char* panels, const int32_t* offsets, const Part& part) const {
  const contraction::Kernels& loops = contraction::kernels();
  const auto multiply = panels_.dtype == DType::F32 ? loops.pixels_f32 : panels_.dtype == DType::U8 ? loops.pixels_narrow_bytes : loops.pixels_bf16;
  const int64_t bytes = ffi::ByteWidth(f.y().dtype), run = in_.has_gaps ? in_.width : part.rows, panel = panels_.bytes();
  const bool odd = panels_.dtype == DType::BF16 && panels_.inner % 2 != 0;
  const Limits limits = limits_.value_or(Limits{-kInfinity, kInfinity});
  char *const y = f.y().as<char>(), *const residual = f.epilogue.residual ? f.epilogue.residual->as<char>() : nullptr;
  for (int64_t column = part.first, next; column < part.last; column = next) {
    next = std::min(column + loops.pixel_columns, part.last);
    const float* const bias = epilogue_.bias() ? epilogue_.bias() + column : nullptr;
    const float* const scale = f.epilogue.scale ? f.epilogue.scale->as<float>() + column : nullptr;
    const int64_t wanted = std::min(next + loops.pixel_columns, part.last) - next;
    const int64_t lines = parts(wanted, contraction::kPanel) * panel / contraction::kLineBytes;
    const char* const fetch = panels + (next - part.first) / contraction::kPanel * panel;
    const contraction::Pixels pixels{run, in_.pixel, in_.taps, in_.tap, panels_.steps(), odd, panels, panel, column - part.first, next - column, bias,
                                     limits.low, limits.high, element_of(f.y().dtype), features_, offsets ? offsets + column : nullptr, scale};
    for (int64_t row = part.row; row < part.row + part.rows; row += run) {
      const int64_t offset = (row * features_ + column) * bytes;
      multiply(pixels, x + in_.place(row), y + offset, residual ? residual + offset : nullptr, {fetch, row == part.row ? lines : 0});
    }
  }
}

void ByPixels::activate(const Epilogue& e, const Part& part) const {
  const int64_t columns = part.last - part.first, lines = columns == features_ ? 1 : part.rows;
  for (int64_t i = 0; i < lines; ++i) {
    float* const y = e.y.as<float>() + (part.row + i) * features_ + part.first;
    epilogue::kernels().activate(e.activation, e.parameters, y, lines == 1 ? part.rows * columns : columns);
  }
}

void ByPixels::run(const Forward& f, const char* panels, const float* factors, const contracted::Int8* int8) {
  epilogue_.point_to(f.epilogue);
  const Scratch copy(in_.has_padding() ? images_ * in_.padded_lines * in_.line + contraction::kStepBytes : 0);
  if (in_.has_padding()) pad(f.x, int8 ? char(int8->zero) : 0, copy.data());
  const char* const x = in_.has_padding() ? copy.data() : f.x.as<char>();
  const int64_t together = contraction::kernels().pixel_columns, groups = parts(features_, together);
  const int64_t images = factors ? images_ : 1, lines = rows_ / in_.width / images;  // images, each by itself
  const Cut cut(lines, in_.width, in_.pixel, groups, parts(contraction::wanted_tasks(rows_ * features_ * panels_.taps * panels_.inner), images));
  const int64_t tasks = cut.blocks * cut.column_parts;
  parallel_for(images * tasks, [&](int64_t i) {
    const int64_t image = i / tasks, block = i % tasks / cut.column_parts, column_part = i % cut.column_parts;
    const auto row = [&](int64_t block) { return (image * lines + block * lines / cut.blocks) * in_.width; };
    const auto column = [&](int64_t part) { return std::min(part * groups / cut.column_parts * together, features_); };
    const Part part{row(block), row(block + 1) - row(block), column(column_part), column(column_part + 1)};
    const int64_t count = parts(part.last - part.first, contraction::kPanel);
    const char* own = panels + part.first / contraction::kPanel * panels_.bytes();
    const Scratch scaled(factors ? count * panels_.bytes() : 0);
    if (factors) {
      scale(own, count, panels_.inner, factors + image * panels_.inner, scaled.data());
      own = scaled.data();
    }
    multiply(f, x, own, int8 ? int8->offsets : nullptr, part);
    if (!limits_) activate(f.epilogue, part);
  });
}

}  // namespace jaxfuse::conv
