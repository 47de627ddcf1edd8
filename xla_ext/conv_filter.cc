#include "conv_filter.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "product.h"
#include "simd_level.h"

namespace jaxfuse::conv::filter {
namespace {

constexpr int64_t kInputs = product::kRows, kOutputs = product::kColumns;  // features of x and of g in a panel

int64_t blocks(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

// Even shares of an extent, as near to `size` as they come.
int64_t share(int64_t extent, int64_t size) {
  size = std::clamp<int64_t>(size, 1, extent);
  return blocks(extent, (extent + size / 2) / size);
}

// Output o reads, by tap k, the input o·stride + k·dilation - padding_low. Of the inputs that some outputs read all are
// packed, padding too; where there is one tap, only those that it reads.
struct Dimension {
  int64_t in = 1, out = 1, taps = 1, stride = 1, dilation = 1, padding_low = 0;

  int64_t packed(int64_t outputs) const { return (outputs - 1) * output_step() + (taps - 1) * dilation + 1; }
  int64_t output_step() const { return taps == 1 ? 1 : stride; }
  int64_t source(int64_t output, int64_t i) const { return output * stride - padding_low + i * (taps == 1 ? stride : 1); }
};

// Two spatial dimensions, a missing one of extent 1 in front.
struct Problem {
  int64_t items, inputs, outputs;
  Dimension rows, columns;

  Problem(const Geometry& g, const Tensor& x, const Tensor& dw, const Tensor& dy)
      : items(dy.shape[0]), inputs(x.shape.back()), outputs(dy.shape.back()) {
    const size_t n = g.spatial_rank();
    Dimension* const dimensions[] = {&rows, &columns};
    for (size_t i = 0; i < n; ++i) {
      *dimensions[2 - n + i] = {x.shape[i + 1], dy.shape[i + 1], dw.shape[g.rhs_spec[i + 2]],
                                g.strides[i],   g.dilation[i],   g.padding_low[i]};
    }
  }

  int64_t taps() const { return rows.taps * columns.taps; }
};

// Some rows of g of one image, or several whole images.
struct Block {
  int64_t item, items, row, rows;
};

// How the sums are cut, by the shapes alone, so that they repeat bit for bit. What a task works on, a block of packed
// pixels and its share of dw, fits into a second-level cache.
struct Cut {
  static constexpr int64_t kPixels = 256, kMostInputs = 66, kMostOutputs = 128;
  static constexpr int64_t kFewTasks = 16, kMostTasks = 256, kLargePart = 8;  // blocks
  int64_t inputs, outputs, input_parts, output_parts;  // a task's features, whole panels of them
  int64_t items, rows, blocks_per_image, count;        // of a block
  int64_t parts;                                       // of the blocks, each with sums of its own

  explicit Cut(const Problem& p) {
    const auto even = [](int64_t extent, int64_t most, int64_t panel) {
      return blocks(blocks(extent, blocks(extent, most)), panel) * panel;
    };
    inputs = even(p.inputs, kMostInputs, kInputs), outputs = even(p.outputs, kMostOutputs, kOutputs);
    input_parts = blocks(p.inputs, inputs), output_parts = blocks(p.outputs, outputs);
    rows = share(p.rows.out, kPixels / p.columns.out);
    items = share(p.items, kPixels / (p.rows.out * p.columns.out));
    blocks_per_image = blocks(p.rows.out, rows);
    count = blocks(p.items, items) * blocks_per_image;
    // A part costs a dw to write and to add: beyond what a few threads need, only large ones are worth it.
    const int64_t tiles = input_parts * output_parts;
    parts = std::clamp<int64_t>(std::max(kFewTasks / tiles, std::min(kMostTasks / tiles, count / kLargePart)), 1, count);
  }

  Block block(const Problem& p, int64_t i) const {
    const int64_t item = i / blocks_per_image * items, row = i % blocks_per_image * rows;
    return {item, std::min(items, p.items - item), row, std::min(rows, p.rows.out - row)};
  }
};

// `count` features of a pixel, or zeros where from is null, into panels of `size`; the last one is filled up with zeros.
template <int64_t size>
void pack_pixel(const float* from, int64_t count, float* to, int64_t panel_stride) {
  for (; count >= size && from; count -= size, from += size, to += panel_stride) std::memcpy(to, from, size * sizeof(float));
  for (; count > 0; count -= size, to += panel_stride) {
    std::memset(to, 0, size * sizeof(float));
    if (from) std::memcpy(to, from, count * sizeof(float));
  }
}

// A task: some features of x and of g.
class Task {
 public:
  Task(const Problem& problem, const Cut& cut, int64_t input_part, int64_t output_part)
      : p_(problem),
        cut_(cut),
        input_(input_part * cut.inputs),
        inputs_(std::min(cut.inputs, problem.inputs - input_)),
        output_(output_part * cut.outputs),
        outputs_(std::min(cut.outputs, problem.outputs - output_)),
        width_(problem.columns.packed(problem.columns.out)),
        x_panel_(cut.items * problem.rows.packed(cut.rows) * width_ * kInputs),
        g_panel_(cut.items * cut.rows * problem.columns.out * kOutputs),
        scratch_((x_panel_ * blocks(inputs_, kInputs) + g_panel_ * blocks(outputs_, kOutputs)) * sizeof(float)),
        x_(reinterpret_cast<float*>(scratch_.data())),
        g_(x_ + x_panel_ * blocks(inputs_, kInputs)) {}

  // Adds the block's products to sums, of shape (taps, inputs, outputs), or writes them there.
  void run(const Block& block, const float* x, const float* g, float* sums, bool first) {
    pack_x(block, x);
    pack_g(block, g);
    const Dimension &rows = p_.rows, &columns = p_.columns;
    offsets_.clear();
    for (int64_t item = 0; item < block.items; ++item) {
      for (int64_t row = 0; row < block.rows; ++row) {
        offsets_.push_back((item * rows.packed(block.rows) + row * rows.output_step()) * width_ * kInputs);
      }
    }
    for (int64_t o = 0; o < outputs_; o += kOutputs) {
      for (int64_t i = 0; i < inputs_; i += kInputs) {
        for (int64_t tap = 0; tap < p_.taps(); ++tap) {
          const int64_t at = tap / columns.taps * rows.dilation * width_ + tap % columns.taps * columns.dilation;
          const product::Panels packed{x_ + i / kInputs * x_panel_ + at * kInputs, g_ + o / kOutputs * g_panel_,
                                       offsets_.data(), int64_t(offsets_.size()), columns.out,
                                       columns.output_step() * kInputs, kOutputs};
          float* to = sums + (tap * p_.inputs + input_ + i) * p_.outputs + output_ + o;
          add_tile(packed, to, std::min(kInputs, inputs_ - i), std::min(kOutputs, outputs_ - o), first);
        }
      }
    }
  }

 private:
  void pack_x(const Block& block, const float* x) {
    const Dimension &rows = p_.rows, &columns = p_.columns;
    float* to = x_;
    for (int64_t item = block.item; item < block.item + block.items; ++item) {
      for (int64_t i = 0; i < rows.packed(block.rows); ++i) {
        const int64_t row = rows.source(block.row, i);
        for (int64_t j = 0; j < width_; ++j, to += kInputs) {
          const int64_t column = columns.source(0, j);
          const bool inside = row >= 0 && row < rows.in && column >= 0 && column < columns.in;
          const int64_t pixel = (item * rows.in + row) * columns.in + column;
          pack_pixel<kInputs>(inside ? x + pixel * p_.inputs + input_ : nullptr, inputs_, to, x_panel_);
        }
      }
    }
  }

  void pack_g(const Block& block, const float* g) {
    const int64_t width = p_.columns.out, pixels = block.items * block.rows * width;
    const float* from = g + (block.item * p_.rows.out + block.row) * width * p_.outputs + output_;
    for (int64_t i = 0; i < pixels; ++i) pack_pixel<kOutputs>(from + i * p_.outputs, outputs_, g_ + i * kOutputs, g_panel_);
  }

  void add_tile(const product::Panels& packed, float* to, int64_t inputs, int64_t outputs, bool first) const {
    if (inputs == kInputs && outputs == kOutputs) return product::kernels().outer_products(packed, kInputs, to, p_.outputs, first);
    float tile[kInputs * kOutputs];
    product::kernels().outer_products(packed, kInputs, tile, kOutputs, true);
    for (int64_t i = 0; i < inputs; ++i) {
      for (int64_t o = 0; o < outputs; ++o) {
        float& sum = to[i * p_.outputs + o];
        sum = first ? tile[i * kOutputs + o] : sum + tile[i * kOutputs + o];
      }
    }
  }

  const Problem& p_;
  const Cut& cut_;
  const int64_t input_, inputs_, output_, outputs_, width_, x_panel_, g_panel_;
  const onednn::Scratch scratch_;
  float *const x_, *const g_;
  std::vector<int64_t> offsets_;
};

// dw, in whatever order its dimensions are, from the sums of the parts, of which the first is overwritten.
void add_parts(const Geometry& geometry, const Problem& p, int64_t parts, float* sums, const Tensor& dw) {
  const Shape strides = geometry.filter_strides(dw);
  const int64_t column_stride = strides.back(), row_stride = strides.size() > 3 ? strides[2] : 0;
  parallel_for(p.taps() * p.inputs, [&](int64_t row) {
    const int64_t tap = row / p.inputs;
    float* to = dw.as<float>() + tap / p.columns.taps * row_stride + tap % p.columns.taps * column_stride +
                row % p.inputs * strides[1];
    float* const sum = sums + row * p.outputs;
    for (int64_t part = 1; part < parts; ++part) {
      const float* const own = sum + part * dw.size();
      for (int64_t o = 0; o < p.outputs; ++o) sum[o] += own[o];
    }
    for (int64_t o = 0; o < p.outputs; ++o) to[o * strides[0]] = sum[o];
  });
}

// Whether a filter lies as the sums do: spatial..., input feature, output feature.
bool is_features_last(const Spec& spec) {
  const int64_t n = int64_t(spec.size()) - 2;
  bool last = spec[0] == n + 1 && spec[1] == n;
  for (int64_t i = 0; i < n; ++i) last &= spec[i + 2] == i;
  return last;
}

}  // namespace

// As measured, see the table in README.md: of one tap oneDNN's kernels are as fast, few inputs leave most of a panel empty,
// and rows are not cut, so that of long ones no block fits into a cache.
bool takes(const Geometry& g, const Tensor& x, const Tensor& dw, const Tensor& dy) {
  if (simd_level() != SimdLevel::avx2 || x.dtype != DType::F32 || dw.dtype != DType::F32) return false;
  if (g.groups > 1 || g.transposed() || g.spatial_rank() > 2) return false;
  if (!is_channels_last(g.lhs_spec) || !is_channels_last(g.out_spec)) return false;
  if (x.size() == 0 || dw.size() == 0 || dy.size() == 0) return false;
  const Problem p(g, x, dw, dy);
  return p.taps() > 1 && p.inputs >= kInputs && p.columns.out <= 2 * Cut::kPixels;
}

void gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const Problem p(geometry, x, dw, g);
  const Cut cut(p);
  const bool in_place = cut.parts == 1 && is_features_last(geometry.rhs_spec);
  const onednn::Scratch scratch(in_place ? 0 : cut.parts * dw.bytes());
  float* sums = in_place ? dw.as<float>() : reinterpret_cast<float*>(scratch.data());
  const int64_t tiles = cut.input_parts * cut.output_parts;
  parallel_for(cut.parts * tiles, [&](int64_t i) {
    Task task(p, cut, i % cut.input_parts, i / cut.input_parts % cut.output_parts);
    const int64_t part = i / tiles, begin = part * cut.count / cut.parts, end = (part + 1) * cut.count / cut.parts;
    for (int64_t block = begin; block < end; ++block) {
      task.run(cut.block(p, block), x.as<float>(), g.as<float>(), sums + part * dw.size(), block == begin);
    }
  });
  if (!in_place) add_parts(geometry, p, cut.parts, sums, dw);
}

}  // namespace jaxfuse::conv::filter
