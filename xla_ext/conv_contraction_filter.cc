#include "conv_contraction_filter.h"

#include <algorithm>
#include <vector>

#include "contraction.h"
#include "conv_contraction.h"
#include "cut.h"
#include "epilogue.h"
#include "parallel.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::conv::contracted {
namespace {

using contraction::kernels, contraction::kPositions, contraction::kStepBytes;

// Output o reads, by tap k, the input o·stride + k·dilation - padding_low. Where there is one tap, only inputs that are read
// are packed; else every input from the first that is read to the last, those of a phase of the stride side by side.
struct Dimension {
  int64_t in = 1, out = 1, taps = 1, stride = 1, dilation = 1, padding_low = 0;

  int64_t phases() const { return taps == 1 ? 1 : stride; }
  int64_t packed(int64_t outputs) const { return taps == 1 ? outputs : parts((outputs - 1) * stride + (taps - 1) * dilation + 1, stride); }
  // The input at place i of a phase, counted from the first that output `first` reads.
  int64_t source(int64_t first, int64_t phase, int64_t i) const { return (first + i) * stride + phase - padding_low; }
  int64_t phase_of(int64_t tap) const { return taps == 1 ? 0 : tap * dilation % stride; }
  int64_t place_of(int64_t tap) const { return taps == 1 ? 0 : tap * dilation / stride; }
  bool inside(int64_t input) const { return input >= 0 && input < in; }
  // Output o reads input o alone, and every input is read.
  bool is_pointwise() const { return taps == 1 && stride == 1 && padding_low == 0 && in == out; }
};

struct Problem {
  int64_t images, inputs, outputs, bytes;  // bytes of an element
  Dimension rows, columns;
  const char *x, *g;

  Problem(const Geometry& geometry, const Tensor& in, const Tensor& dw, const Tensor& dy)
      : images(dy.shape[0]), inputs(in.shape[geometry.lhs_spec[1]]), outputs(dy.shape[geometry.out_spec[1]]),
        bytes(ffi::ByteWidth(in.dtype)), x(in.as<char>()), g(dy.as<char>()) {
    const size_t n = geometry.spatial_rank();
    Dimension* const dimensions[] = {&rows, &columns};
    for (size_t i = 0; i < n; ++i) {
      *dimensions[2 - n + i] = {in.shape[i + 1],     dy.shape[i + 1],      dw.shape[geometry.rhs_spec[i + 2]],
                                geometry.strides[i], geometry.dilation[i], geometry.padding_low[i]};
    }
    if (rows.is_pointwise() && columns.is_pointwise()) {  // every pixel by itself
      columns = {images * rows.in * columns.in, images * rows.out * columns.out, 1, 1, 1, 0};
      rows = {}, images = 1;
    }
  }

  int64_t taps() const { return rows.taps * columns.taps; }
  const contraction::Products& products() const { return contraction::products_of(bytes == 4 ? DType::F32 : DType::BF16); }
  const char* pixel(int64_t image, int64_t row, int64_t column) const {
    return x + ((image * rows.in + row) * columns.in + column) * inputs * bytes;
  }
};

// Some columns of some rows of some images of g.
struct Block {
  int64_t image, images, row, rows, column, columns;
  int64_t lines() const { return images * rows; }
};

// How the sums are cut, by the shapes alone, so that they repeat bit for bit. A task's sums, and what it packs of x and g, stay in
// the second-level cache.
struct Cut {
  static constexpr int64_t kSteps = 256, kSums = 64 << 10, kFewTasks = 8, kLongest = 16;
  int64_t tile;                        // inputs of one
  int64_t inputs, outputs;             // of a task: whole tiles, whole panels
  int64_t input_parts, output_parts;
  int64_t images, rows, columns;       // of a block
  int64_t per_row, per_image, blocks;  // how many there are
  int64_t parts_of_blocks;             // each with sums of its own

  explicit Cut(const Problem& p) : tile(p.products().rows) {
    const int64_t panel = kernels().columns;
    const int64_t most_outputs = std::max(panel, (p.taps() == 1 ? 256 : 64) / panel * panel);
    outputs = padded(even(p.outputs, most_outputs), panel), output_parts = parts(p.outputs, outputs);
    inputs = padded(even(p.inputs, std::max(tile, kSums / p.taps() / outputs / tile * tile)), tile), input_parts = parts(p.inputs, inputs);
    const int64_t pixels = kSteps * kStepBytes / p.bytes;
    columns = even(p.columns.out, pixels);
    rows = even(p.rows.out, std::max<int64_t>(1, pixels / p.columns.out));
    images = even(p.images, std::max<int64_t>(1, pixels / (p.columns.out * p.rows.out)));
    per_row = parts(p.columns.out, columns), per_image = parts(p.rows.out, rows) * per_row;
    blocks = parts(p.images, images) * per_image;
    const int64_t few = parts(kFewTasks, input_parts * output_parts);
    parts_of_blocks = std::min(blocks, std::max(few, parts(blocks, kLongest)));
  }

  Block block(const Problem& p, int64_t i) const {
    const int64_t image = i / per_image * images, row = i % per_image / per_row * rows, column = i % per_row * columns;
    return {image, std::min(images, p.images - image), row, std::min(rows, p.rows.out - row),
            column, std::min(columns, p.columns.out - column)};
  }

  int64_t tiles(int64_t count) const { return parts(count, tile); }
  // A task's.
  int64_t sums(const Problem& p) const { return p.taps() * inputs * outputs; }
};

// Some features of x and of g.
class Task {
 public:
  Task(const Problem& p, const Cut& cut, int64_t number)
      : p_(p), loops_(kernels()), products_(p.products()), input_(number % cut.input_parts * cut.inputs), inputs_(std::min(cut.inputs, p.inputs - input_)),
        output_(number / cut.input_parts * cut.outputs), outputs_(std::min(cut.outputs, p.outputs - output_)),
        row_(p.columns.packed(cut.columns)),
        phase_(padded(cut.images * p.rows.phases() * p.rows.packed(cut.rows) * row_, kPositions)),
        stride_(p.columns.phases() * phase_ * p.bytes + 64), zeros_(p.inputs * p.bytes + 64),
        x_(inputs_ * stride_ + 64), g_(cut.images * cut.rows * steps(cut.columns) * loops_.columns * kStepBytes),
        copy_stride_(padded(cut.images * cut.rows * steps(cut.columns) * kStepBytes, contraction::kLineBytes) + contraction::kLineBytes),
        copies_(products_.copy ? products_.rows * copy_stride_ : 0), positions_(p.columns.phases() * phase_) {
    std::fill_n(zeros_.data(), p.inputs * p.bytes, 0);
    for (int64_t i = 0; i < products_.rows; ++i) copied_at_.push_back(copies_.data() + i * copy_stride_);
  }

  // Adds the block's products to tiles of sums, or writes them: [panel][tap][tile][row][column].
  void run(const Block& b, float* sums, bool first) {
    pack_x(b);
    const bool whole = p_.taps() == 1;  // lines follow one another
    const int64_t lines = whole ? 1 : b.lines(), length = whole ? b.lines() * b.columns : b.columns;
    point(b, lines);
    const auto pack = p_.bytes == 4 ? loops_.pack_f32 : loops_.pack_bf16;
    const int64_t per = kStepBytes / p_.bytes, line_bytes = steps(length) * layout_.line;
    for (int64_t n = 0; n < outputs_; n += loops_.columns) {
      const int64_t count = std::min(loops_.columns, outputs_ - n);
      for (int64_t line = 0; line < lines; ++line) {
        pack({p_.bytes == 4 ? Element::f32 : Element::bf16, g_of(b, line, output_ + n), p_.outputs, 1}, count, length,
             g_.data() + line * line_bytes, layout_);
      }
      for (int64_t tap = 0; tap < p_.taps(); ++tap) {
        const int64_t column_tap = tap % p_.columns.taps, row_tap = tap / p_.columns.taps;
        const int64_t offset = p_.columns.phase_of(column_tap) * phase_ + p_.columns.place_of(column_tap) +
                               (p_.rows.phase_of(row_tap) * p_.rows.packed(b.rows) + p_.rows.place_of(row_tap)) * row_;
        for (int64_t c = 0; c < inputs_; c += products_.rows, sums += products_.rows * loops_.columns) {
          multiply({pointers_.data() + c, nullptr, inputs_, offset * p_.bytes, lines, steps(length), length % per != 0,
                    count, g_.data(), layout_, nullptr, 0, 0}, std::min(products_.rows, inputs_ - c), sums, first);
        }
      }
    }
  }

 private:
  void multiply(contraction::Tile tile, int64_t count, float* sums, bool first) {
    if (products_.copy) {
      products_.copy(tile, count, copies_.data(), copy_stride_);
      tile = contraction::of_copies(tile, copied_at_.data(), 0);
    }
    products_.multiply(tile, count, sums, first);
  }

  int64_t steps(int64_t length) const { return parts(length * p_.bytes, kStepBytes); }

  const char* g_of(const Block& b, int64_t line, int64_t output) const {
    const int64_t image = b.image + line / b.rows, row = b.row + line % b.rows;
    return p_.g + (((image * p_.rows.out + row) * p_.columns.out + b.column) * p_.outputs + output) * p_.bytes;
  }

  // Rows of a block follow one another: of an image, of a phase of their stride.
  void pack_x(const Block& b) {
    auto at = positions_.begin();
    for (int64_t phase = 0; phase < p_.columns.phases(); ++phase) {
      const auto begin = at;
      for (int64_t image = b.image; image < b.image + b.images; ++image) {
        for (int64_t row_phase = 0; row_phase < p_.rows.phases(); ++row_phase) {
          for (int64_t i = 0; i < p_.rows.packed(b.rows); ++i) {
            const int64_t row = p_.rows.source(b.row, row_phase, i);
            for (int64_t j = 0; j < row_length(b); ++j) {
              const int64_t column = p_.columns.source(b.column, phase, j);
              const bool inside = p_.rows.inside(row) && p_.columns.inside(column);
              *at++ = (inside ? p_.pixel(image, row, column) : zeros_.data()) + input_ * p_.bytes;
            }
          }
        }
      }
      std::fill(at, begin + phase_, zeros_.data());
      at = begin + phase_;
    }
    (p_.bytes == 4 ? loops_.transpose_f32 : loops_.transpose_bf16)(positions_.data(), int64_t(positions_.size()), inputs_, x_.data(), stride_);
  }

  // Rows of a narrower block, the last of a row, are as long where they are told apart.
  int64_t row_length(const Block& b) const { return p_.taps() == 1 ? b.columns : row_; }

  void point(const Block& b, int64_t lines) {
    pointers_.resize(lines * inputs_);
    for (int64_t line = 0; line < lines; ++line) {
      const int64_t row = line / b.rows * p_.rows.phases() * p_.rows.packed(b.rows) + line % b.rows;
      for (int64_t c = 0; c < inputs_; ++c) pointers_[line * inputs_ + c] = x_.data() + c * stride_ + row * row_ * p_.bytes;
    }
  }

  const Problem& p_;
  const contraction::Kernels& loops_;
  const contraction::Products& products_;
  const contraction::Layout layout_ = contraction::side_by_side();
  const int64_t input_, inputs_, output_, outputs_, row_, phase_, stride_;
  const Scratch zeros_, x_, g_;
  const int64_t copy_stride_;
  const Scratch copies_;
  std::vector<const char*> positions_, pointers_, copied_at_;
};

// dw from the sums of tasks.
class Written {
 public:
  Written(const Geometry& geometry, const Tensor& dw, const Problem& p, const Cut& cut)
      : dw_(dw), p_(p), cut_(cut), loops_(kernels()), strides_(geometry.filter_strides(dw)) {}

  // A task's tiles, those of one tap and one place in each of its panels taken as one.
  int64_t rows() const { return p_.taps() * cut_.tiles(cut_.inputs); }

  // Of one of these, from the sums of `count` parts, of which the first is overwritten.
  void write(int64_t number, int64_t row, float* sums, int64_t count) const {
    const int64_t tap = row % p_.taps(), first = row / p_.taps() * cut_.tile;
    const int64_t input = number % cut_.input_parts * cut_.inputs, inputs = std::min(cut_.inputs, p_.inputs - input);
    const int64_t output = number / cut_.input_parts * cut_.outputs, outputs = std::min(cut_.outputs, p_.outputs - output);
    if (first >= inputs) return;
    for (int64_t n = 0; n < outputs; n += loops_.columns) {
      const int64_t tile = cut_.tile * loops_.columns, panel = n / loops_.columns;
      float* const total = sums + ((panel * p_.taps() + tap) * cut_.tiles(inputs) + first / cut_.tile) * tile;
      for (int64_t part = 1; part < count; ++part) {
        const float* const own = total + part * cut_.sums(p_);
        for (int64_t j = 0; j < tile; ++j) total[j] += own[j];
      }
      char* const to = dw_.as<char>() + place(tap, input + first, output + n) * int64_t(ffi::ByteWidth(dw_.dtype));
      const epilogue::Tile written{element_of(dw_.dtype), std::min(loops_.columns, outputs - n), strides_[1], 0, Activation::none, {},
                                   total, loops_.columns, true, nullptr, nullptr, nullptr, false, nullptr, to};
      epilogue::kernels().apply(written, 0, std::min(cut_.tile, inputs - first));
    }
  }

 private:
  int64_t place(int64_t tap, int64_t input, int64_t output) const {
    const size_t n = strides_.size();
    const int64_t row = n > 3 ? tap / p_.columns.taps * strides_[2] : 0;
    return row + tap % p_.columns.taps * strides_[n - 1] + input * strides_[1] + output;
  }

  const Tensor dw_;
  const Problem& p_;
  const Cut& cut_;
  const contraction::Kernels& loops_;
  const Shape strides_;
};

}  // namespace

bool takes_filter_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const bool fits = is_channels_last(geometry.lhs_spec) && is_channels_last(geometry.out_spec) && geometry.groups == 1 &&
                    geometry.spatial_rank() <= 2 && !geometry.transposed() && geometry.filter_strides(dw)[0] == 1;
  if (!fits || dw.size() == 0 || x.size() == 0 || g.size() == 0) return false;
  if (contraction::always()) return true;
  // Where oneDNN is slower, as measured on Zen 5 and, with AVX2, on Zen 3 (benchmarks/README.md). Of few features a tile would be all but
  // empty.
  constexpr int64_t kFilterForPixel = 100, kFewestInputs = 14;
  const bool single = geometry.taps(dw) == 1;
  const int64_t channels = x.shape[geometry.lhs_spec[1]], features = g.shape[geometry.out_spec[1]], pixels = g.size() / features;
  if (channels < kFewestInputs) return false;
  if (simd_level() == SimdLevel::avx2) return x.dtype == DType::F32 && dw.size() * pixels >= kManyProducts;
  if (!contraction::has_bf16()) return false;
  if (geometry.strided()) {
    constexpr int64_t kManyPixels = 2000, kFilterForStridedPixel = 300;
    const bool large = pixels >= kManyPixels || dw.size() >= kFilterForStridedPixel * pixels;
    return large && (x.dtype == DType::BF16 || !single);
  }
  if (!single) return false;
  if (x.dtype == DType::BF16) return dw.size() >= kFilterForPixel * pixels;
  constexpr int64_t kManyPixels = 6000, kMostInputs = 192, kPanel = contraction::kPanel;
  return pixels >= kManyPixels && channels <= kMostInputs && channels % kPanel == 0 && features % kPanel == 0;
}

void filter_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const Problem p(geometry, x, dw, g);
  const Cut cut(p);
  const Written written(geometry, dw, p, cut);
  const int64_t tasks = cut.input_parts * cut.output_parts, count = cut.parts_of_blocks;
  const auto run = [&](int64_t number, int64_t part, float* sums) {
    Task task(p, cut, number);
    const contraction::Multiplying multiplying(p.products());
    const int64_t begin = part * cut.blocks / count, end = (part + 1) * cut.blocks / count;
    for (int64_t block = begin; block < end; ++block) task.run(cut.block(p, block), sums, block == begin);
  };
  if (count == 1) {  // written while the sums are in the cache
    return parallel_for(tasks, [&](int64_t number) {
      const Scratch sums(cut.sums(p) * sizeof(float));
      run(number, 0, sums.as<float>());
      for (int64_t row = 0; row < written.rows(); ++row) written.write(number, row, sums.as<float>(), 1);
    });
  }
  const Scratch sums(tasks * count * cut.sums(p) * sizeof(float));
  const auto sums_of = [&](int64_t number) { return sums.as<float>() + number * count * cut.sums(p); };
  parallel_for(tasks * count, [&](int64_t i) { run(i % tasks, i / tasks, sums_of(i % tasks) + i / tasks * cut.sums(p)); });
  parallel_for(tasks * written.rows(), [&](int64_t i) {
    const int64_t number = i / written.rows();
    written.write(number, i % written.rows(), sums_of(number), count);
  });
}

}  // namespace jaxfuse::conv::contracted
