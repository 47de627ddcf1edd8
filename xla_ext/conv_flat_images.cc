#include "conv_flat_images.h"

#include <algorithm>
#include <cstring>

#include "conv_merged_lines.h"
#include "parallel.h"

namespace jaxfuse::conv::contracted {

// Outputs that do not fill a line and its gap would be too many that nobody wants.
bool FlatImages::takes(const Forward& f) {
  const Geometry& g = f.geometry;
  const contraction::Products& products = contraction::products_of(f.x.dtype);
  const bool has_one_step = !g.transposed() && !g.strided() && g.spatial_rank() <= 2;
  if (!products.copy || !has_one_step || g.groups > 1 || g.filter_swapped || g.taps(f.w) == 1 || merges_lines(g, f.w)) return false;
  if (f.x.shape.back() * int64_t(ffi::ByteWidth(f.x.dtype)) % contraction::kLineBytes != 0) return false;
  for (int64_t i = 0; i < 2; ++i) {
    const Axis a = axis(f, i);
    if (a.low < 0 || a.high < 0 || a.outputs > a.extent() || 2 * a.outputs < a.extent()) return false;
  }
  return f.x.size() > 0;
}

FlatImages::Axis FlatImages::axis(const Forward& f, int64_t from_last) {
  const Geometry& g = f.geometry;
  const int64_t i = int64_t(g.spatial_rank()) - 1 - from_last;
  if (i < 0) return {1, 1, 1, 1, 0, 0};
  return {f.x.shape[i + 1], f.y().shape[i + 1], f.w.shape[g.rhs_spec[i + 2]], g.dilation[i], g.padding_low[i], g.padding_high[i]};
}

FlatImages::FlatImages(const Forward& f, const char* panels, const Int8* int8)
    : x_(f.x), int8_(int8), images_(f.x.shape[0]), features_(f.y().shape.back()),
      pixel_(f.x.shape.back() * int64_t(ffi::ByteWidth(f.x.dtype))), lines_(axis(f, 1)), pixels_(axis(f, 0)),
      epilogue_(f.epilogue, {f.y().size() / features_, features_}) {
  contraction::Filter filter = contracted::filter(f.geometry, f.w);
  filter.panels = panels, filter.narrow = int8 && int8->narrow;
  // Behind the last output of the last image nothing is wanted.
  const int64_t rows = pixels() - (lines_.extent() - lines_.outputs) * pixels_.extent() - (pixels_.extent() - pixels_.outputs);
  problems_.push_back({rows, f.x.shape.back(), features_, f.x.dtype, filter,
                       [this](int64_t first, int64_t count, const char** at, int64_t step) { point(first, count, at, step); }});
  plans_.emplace(problems_);
}

void FlatImages::point(int64_t first, int64_t count, const char** at, int64_t step) const {
  for (int64_t tap = 0; tap < lines_.taps * pixels_.taps; ++tap, at += step) {
    const int64_t line = tap / pixels_.taps * lines_.dilation, place = tap % pixels_.taps * pixels_.dilation;
    const char* const from = flat_ + (first + line * pixels_.extent() + place) * pixel_;
    for (int64_t i = 0; i < count; ++i) at[i] = from + i * pixel_;
  }
}

void FlatImages::point_to(const Forward& f, const char* panels) {
  epilogue_.point_to(f.epilogue);
  x_ = f.x;
  problems_[0].filter.panels = panels;
}

bool FlatImages::run() {
  const Scratch flat((before() + pixels() + behind()) * pixel_);
  fill(flat.data());
  flat_ = flat.data();
  const bool finite = plans_->multiply([&](const contraction::Block& b) { finish(b); }, [](const contraction::Block&) {});
  return finite || (lines_.gap() == 0 && pixels_.gap() == 0);
}

void FlatImages::fill(char* to) const {
  const int zero = int8_ ? int8_->zero : 0;
  const int64_t line = pixels_.inputs * pixel_, step = pixels_.extent() * pixel_, per_image = lines_.extent();
  std::memset(to, zero, before() * pixel_);
  char* const first = to + before() * pixel_;
  std::memset(first + pixels() * pixel_, zero, behind() * pixel_);
  parallel_for(images_ * per_image, [&](int64_t i) {
    char* const at = first + i * step;
    const int64_t number = i % per_image;
    if (number >= lines_.inputs) return (void)std::memset(at, zero, step);
    std::memcpy(at, x_.as<char>() + (i / per_image * lines_.inputs + number) * line, line);
    std::memset(at + line, zero, step - line);
  });
}

// Line by line, without what lies between them.
void FlatImages::finish(const contraction::Block& b) const {
  if (int8_) contraction::kernels().to_floats(b.sums, b.rows, b.stride, b.columns, int8_->offsets + b.column);
  for (int64_t row = 0, run; row < b.rows; row += run) {
    const int64_t at = b.row + row, column = at % pixels_.extent(), line = at / pixels_.extent(), number = line % lines_.extent();
    run = std::min(b.rows - row, pixels_.extent() - column);
    const int64_t wanted = std::min(run, pixels_.outputs - column);
    if (wanted <= 0 || number >= lines_.outputs) continue;
    const int64_t pixel = (line / lines_.extent() * lines_.outputs + number) * pixels_.outputs + column;
    const int64_t offset = pixel * features_ + b.column;
    epilogue::kernels().apply(epilogue_.tile(b.sums + row * b.stride, DType::F32, b.stride, offset, b.column, b.columns), 0, wanted);
  }
}

}  // namespace jaxfuse::conv::contracted
