#include "conv_filter.h"

#include <algorithm>
#include <cstring>

#include "cut.h"
#include "parallel.h"
#include "product.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::conv::filter {
namespace {

constexpr int64_t kOutputs = product::kColumns;  // features of g in a panel

// Even parts of an extent, as near to `size` as they come.
int64_t even_near(int64_t extent, int64_t size) {
  size = std::clamp<int64_t>(size, 1, extent);
  return parts(extent, (extent + size / 2) / size);
}

// Output o reads, by tap k, the input o·stride + k·dilation - padding_low. Of the inputs that some outputs read all are
// packed, padding too; where there is one tap, only those that it reads.
struct Dimension {
  int64_t in = 1, out = 1, taps = 1, stride = 1, dilation = 1, padding_low = 0;

  int64_t packed(int64_t outputs) const { return (outputs - 1) * output_step() + (taps - 1) * dilation + 1; }
  int64_t output_step() const { return taps == 1 ? 1 : stride; }
  int64_t source(int64_t output, int64_t i) const { return output * stride - padding_low + i * (taps == 1 ? stride : 1); }
  bool inside(int64_t input) const { return input >= 0 && input < in; }
};

// x or g, with its strides as three spatial dimensions have them.
struct View {
  const float* data;
  int64_t image, feature, plane, row, column;

  View(const Tensor& t, const Spec& spec) : data(t.as<float>()) {
    const Shape strides = strides_of(t, spec);
    const size_t n = spec.size() - 2;
    image = strides[0], feature = strides[1], column = strides[n + 1];
    row = n > 1 ? strides[n] : 0, plane = n > 2 ? strides[n - 1] : 0;
  }
};

// Three spatial dimensions, missing ones of extent 1 in front; features are a group's.
struct Problem {
  int64_t images, groups, inputs, outputs;
  Dimension planes, rows, columns;
  View x, g;
  // Whether the taps of a row, with all their features, are taken for as many features of one pixel: few would leave most
  // of a panel empty.
  bool row_as_features;

  Problem(const Geometry& geometry, const Tensor& in, const Tensor& dw, const Tensor& dy)
      : images(dy.shape[geometry.out_spec[0]]),
        groups(geometry.groups),
        inputs(in.shape[geometry.lhs_spec[1]] / groups),
        outputs(dy.shape[geometry.out_spec[1]] / groups),
        x(in, geometry.lhs_spec),
        g(dy, geometry.out_spec) {
    const size_t n = geometry.spatial_rank();
    Dimension* const dimensions[] = {&planes, &rows, &columns};
    for (size_t i = 0; i < n; ++i) {
      *dimensions[3 - n + i] = {in.shape[geometry.lhs_spec[i + 2]],  dy.shape[geometry.out_spec[i + 2]],
                                dw.shape[geometry.rhs_spec[i + 2]],  geometry.strides[i],
                                geometry.dilation[i],                geometry.padding_low[i]};
    }
    row_as_features = inputs <= kFewInputs && columns.dilation == 1;
  }

  static constexpr int64_t kFewInputs = 16;

  int64_t slices() const { return images * planes.out; }  // images, or their planes
  int64_t taps() const { return rows.taps * columns.taps; }
  int64_t panel() const { return row_as_features ? inputs : product::kernels().rows; }  // features of a pixel that lie together
};

// Some columns of a row of g of one slice, some rows, or several whole slices.
struct Block {
  int64_t slice, slices, row, rows, column, columns;
};

// How the sums are cut, by the shapes alone, so that they repeat bit for bit. What a task works on, a block of packed
// pixels and its part of dw, fits into a second-level cache.
struct Cut {
  static constexpr int64_t kPixels = 256, kMostInputs = 66, kMostOutputs = 128;
  static constexpr int64_t kFewTasks = 16, kMostTasks = 256, kLargePart = 8, kLongPart = 128;  // blocks
  int64_t inputs, outputs, input_parts, output_parts;  // a task's features, whole panels of them
  int64_t slices, rows, columns;                        // of a block
  int64_t blocks_per_row, blocks_per_slice, count;
  int64_t tiles;                                       // tasks that share a block
  int64_t sum_parts;                                   // of the blocks, each with sums of its own

  explicit Cut(const Problem& p) {
    inputs = padded(even(p.inputs, kMostInputs), p.panel()), outputs = padded(even(p.outputs, kMostOutputs), kOutputs);
    input_parts = parts(p.inputs, inputs), output_parts = parts(p.outputs, outputs);
    columns = p.columns.out <= 2 * kPixels ? p.columns.out : even_near(p.columns.out, kPixels);
    rows = even_near(p.rows.out, kPixels / p.columns.out);
    slices = even_near(p.slices(), kPixels / (p.rows.out * p.columns.out));
    blocks_per_row = parts(p.columns.out, columns), blocks_per_slice = parts(p.rows.out, rows) * blocks_per_row;
    count = parts(p.slices(), slices) * blocks_per_slice;
    // A part costs a dw to write and to add: beyond what a few threads and short sums need, only large ones are worth it.
    tiles = input_parts * output_parts * p.groups * p.planes.taps;
    const int64_t tasks = std::max(kFewTasks / tiles, std::min(kMostTasks / tiles, count / kLargePart));
    sum_parts = std::clamp<int64_t>(std::max(tasks, count / kLongPart), 1, count);
  }

  Block block(const Problem& p, int64_t i) const {
    const int64_t slice = i / blocks_per_slice * slices, row = i % blocks_per_slice / blocks_per_row * rows,
                  column = i % blocks_per_row * columns;
    return {slice, std::min(slices, p.slices() - slice), row,    std::min(rows, p.rows.out - row),
            column, std::min(columns, p.columns.out - column)};
  }
};

// `count` features of a pixel, or zeros where from is null, into panels of `size`; the last one is filled up with zeros.
void pack_pixel(const float* from, int64_t stride, int64_t count, float* to, int64_t size, int64_t panel_stride) {
  for (; count > 0; count -= size, to += panel_stride) {
    const int64_t some = from ? std::min(count, size) : 0;
    for (int64_t i = 0; i < some; ++i) to[i] = from[i * stride];
    for (int64_t i = some; i < size; ++i) to[i] = 0;
    if (from) from += size * stride;
  }
}

// The same of features that lie side by side.
template <int64_t size>
void pack_pixel(const float* from, int64_t count, float* to, int64_t panel_stride) {
  for (; count >= size && from; count -= size, from += size, to += panel_stride) std::memcpy(to, from, size * sizeof(float));
  if (count > 0) pack_pixel(from, 1, count, to, size, panel_stride);
}

// A task: some features of x and of g, of a group, and the taps in a plane.
class Task {
 public:
  Task(const Problem& problem, const Cut& cut, int64_t tile)
      : p_(problem),
        input_(tile % cut.input_parts * cut.inputs),
        inputs_(std::min(cut.inputs, problem.inputs - input_)),
        output_(tile / cut.input_parts % cut.output_parts * cut.outputs),
        outputs_(std::min(cut.outputs, problem.outputs - output_)),
        group_(tile / cut.input_parts / cut.output_parts % problem.groups),
        plane_(tile / cut.input_parts / cut.output_parts / problem.groups),
        width_(problem.columns.packed(cut.columns)),
        x_panel_(cut.slices * problem.rows.packed(cut.rows) * width_ * problem.panel()),
        narrow_(outputs_ <= kOutputs / 2),
        g_panel_(cut.slices * cut.rows * cut.columns * g_size()),
        scratch_((x_panel_ * parts(inputs_, problem.panel()) + g_panel_ * parts(outputs_, kOutputs)) * sizeof(float)),
        x_(scratch_.as<float>()),
        g_(x_ + x_panel_ * parts(inputs_, problem.panel())) {}

  // Adds the block's products to sums, of shape (planes, groups, taps, inputs, outputs), or writes them there.
  void run(const Block& block, float* sums, bool first) {
    pack_x(block);
    pack_g(block);
    const Dimension &rows = p_.rows, &columns = p_.columns;
    offsets_.clear();
    for (int64_t slice = 0; slice < block.slices; ++slice) {
      for (int64_t row = 0; row < block.rows; ++row) {
        offsets_.push_back((slice * rows.packed(block.rows) + row * rows.output_step()) * width_ * p_.panel());
      }
    }
    const int64_t taps_beside = p_.row_as_features ? columns.taps : 1, inputs = taps_beside * inputs_;
    float* const own = sums + (plane_ * p_.groups + group_) * p_.taps() * p_.inputs * p_.outputs;
    for (int64_t o = 0, together; o < outputs_; o += together) {
      together = outputs_ - o < product::kernels().columns ? kOutputs : product::kernels().columns;
      for (int64_t i = 0; i < inputs; i += product::kernels().rows) {
        for (int64_t tap = 0; tap < p_.taps(); tap += taps_beside) {
          const int64_t at = tap / columns.taps * rows.dilation * width_ + tap % columns.taps * columns.dilation;
          const int64_t feature = p_.row_as_features ? i : i / product::kernels().rows * x_panel_;
          const product::Panels packed{x_ + at * p_.panel() + feature, g_ + o / kOutputs * g_panel_, offsets_.data(),
                                       int64_t(offsets_.size()), block.columns, columns.output_step() * p_.panel(), g_size(), 1,
                                       narrow_ ? kOutputs / 2 : together, g_panel_};
          float* to = own + (tap * p_.inputs + input_ + i) * p_.outputs + output_ + o;
          add_tile(packed, to, std::min(product::kernels().rows, inputs - i), std::min(together, outputs_ - o), first);
        }
      }
    }
  }

 private:
  void pack_x(const Block& block) {
    const Dimension &rows = p_.rows, &columns = p_.columns;
    const View& x = p_.x;
    float* to = x_;
    for (int64_t slice = block.slice; slice < block.slice + block.slices; ++slice) {
      const int64_t plane = p_.planes.source(slice % p_.planes.out, 0) + plane_ * p_.planes.dilation;
      const float* const from = x.data + slice / p_.planes.out * x.image + plane * x.plane +
                                (group_ * p_.inputs + input_) * x.feature;
      for (int64_t i = 0; i < rows.packed(block.rows); ++i, to += width_ * p_.panel()) {
        const int64_t row = rows.source(block.row, i);
        pack_row(p_.planes.inside(plane) && rows.inside(row) ? from + row * x.row : nullptr, columns.source(block.column, 0),
                 columns.packed(block.columns), to);
      }
    }
  }

  // `count` pixels of a row of x, or of zeros where it is null, of which the first is in column `begin`.
  void pack_row(const float* row, int64_t begin, int64_t count, float* to) const {
    const int64_t panel = p_.panel(), step = p_.columns.source(0, 1) - p_.columns.source(0, 0);
    for (int64_t j = 0, column = begin; j < count; ++j, column += step, to += panel) {
      const float* const from = row && p_.columns.inside(column) ? row + column * p_.x.column : nullptr;
      if (p_.x.feature == 1 && panel == 6) {
        pack_pixel<6>(from, inputs_, to, x_panel_);
      } else if (p_.x.feature == 1 && panel == 12) {
        pack_pixel<12>(from, inputs_, to, x_panel_);
      } else {
        pack_pixel(from, p_.x.feature, inputs_, to, panel, x_panel_);
      }
    }
  }

  void pack_g(const Block& block) {
    const View& g = p_.g;
    float* to = g_;
    for (int64_t slice = block.slice; slice < block.slice + block.slices; ++slice) {
      for (int64_t row = block.row; row < block.row + block.rows; ++row) {
        const float* from = g.data + slice / p_.planes.out * g.image + slice % p_.planes.out * g.plane + row * g.row +
                            block.column * g.column + (group_ * p_.outputs + output_) * g.feature;
        for (int64_t i = 0; i < block.columns; ++i, from += g.column, to += g_size()) {
          g.feature == 1 && !narrow_ ? pack_pixel<kOutputs>(from, outputs_, to, g_panel_)
                                     : pack_pixel(from, g.feature, outputs_, to, g_size(), g_panel_);
        }
      }
    }
  }

  int64_t g_size() const { return narrow_ ? kOutputs / 2 : kOutputs; }  // of a panel

  void add_tile(const product::Panels& packed, float* to, int64_t inputs, int64_t outputs, bool first) const {
    if (outputs % kOutputs == 0) return product::kernels().outer_products(packed, inputs, to, p_.outputs, first);
    float tile[product::kMostRows * kOutputs];
    product::kernels().outer_products(packed, inputs, tile, kOutputs, true);
    for (int64_t i = 0; i < inputs; ++i) {
      for (int64_t o = 0; o < outputs; ++o) {
        float& sum = to[i * p_.outputs + o];
        sum = first ? tile[i * kOutputs + o] : sum + tile[i * kOutputs + o];
      }
    }
  }

  const Problem& p_;
  const int64_t input_, inputs_, output_, outputs_, group_, plane_, width_, x_panel_;
  const bool narrow_;  // few features of g
  const int64_t g_panel_;
  const Scratch scratch_;
  float *const x_, *const g_;
  std::vector<int64_t> offsets_;
};

// dw, in whatever order its dimensions are, from the sums of the parts, of which the first is overwritten.
void add_parts(const Geometry& geometry, const Problem& p, int64_t parts, float* sums, const Tensor& dw) {
  const Shape strides = geometry.filter_strides(dw);
  const size_t n = strides.size();
  const int64_t column = strides[n - 1], row = n > 3 ? strides[n - 2] : 0, plane = n > 4 ? strides[2] : 0;
  const int64_t input = strides[!geometry.filter_swapped], output = strides[geometry.filter_swapped];
  const int64_t group = geometry.filter_swapped ? p.inputs * input : p.outputs * output;
  parallel_for(dw.size() / p.outputs, [&](int64_t i) {
    const int64_t tap = i / p.inputs % p.taps(), outer = i / p.inputs / p.taps();
    float* to = dw.as<float>() + outer / p.groups * plane + outer % p.groups * group + tap / p.columns.taps * row +
                tap % p.columns.taps * column + i % p.inputs * input;
    float* const sum = sums + i * p.outputs;
    for (int64_t part = 1; part < parts; ++part) {
      const float* const own = sum + part * dw.size();
      for (int64_t o = 0; o < p.outputs; ++o) sum[o] += own[o];
    }
    for (int64_t o = 0; o < p.outputs; ++o) to[o * output] = sum[o];
  });
}

}  // namespace

// As measured (benchmarks/results/kernels.md): of one tap oneDNN's kernels are as fast, with AVX-512 also those of many inputs.
bool is_faster(const Geometry& g, const Tensor& dw) {
  if (simd_level() == SimdLevel::portable || g.groups > 1 || g.taps(dw) == 1) return false;
  return simd_level() == SimdLevel::avx2 || g.inputs_per_group(dw) < Problem::kFewInputs;
}

void gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const Problem p(geometry, x, dw, g);
  const Cut cut(p);
  const bool in_place = cut.sum_parts == 1 && p.groups == 1 && is_features_last(geometry.rhs_spec);
  const Scratch scratch(in_place ? 0 : cut.sum_parts * dw.bytes());
  float* sums = in_place ? dw.as<float>() : scratch.as<float>();
  parallel_for(cut.sum_parts * cut.tiles, [&](int64_t i) {
    Task task(p, cut, i % cut.tiles);
    const int64_t part = i / cut.tiles, begin = part * cut.count / cut.sum_parts, end = (part + 1) * cut.count / cut.sum_parts;
    for (int64_t block = begin; block < end; ++block) {
      task.run(cut.block(p, block), sums + part * dw.size(), block == begin);
    }
  });
  if (!in_place) add_parts(geometry, p, cut.sum_parts, sums, dw);
}

}  // namespace jaxfuse::conv::filter
