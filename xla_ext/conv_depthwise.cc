#include "conv_depthwise.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "bf16.h"
#include "conv_depthwise_kernels.h"
#include "onednn/onednn.h"
#include "cut.h"
#include "parallel.h"
#include "partial_sums.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::conv::depthwise {
namespace {

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

// Output o reads, by tap k, the input (o·stride + k·dilation - padding_low) / in_dilation, where that is a whole number
// and no padding. Either stride or in_dilation is 1. (in_dilation: as jax.lax calls lhs_dilation.)
struct Dimension {
  int64_t in = 1, out = 1, taps = 1, stride = 1, dilation = 1, padding_low = 0, in_dilation = 1;

  // The same between dx and dy: dx[i] = Σ w[k]·dy[(i + padding_low - k·dilation) / stride], the taps in reverse.
  Dimension transposed() const {
    return {out, in, taps, in_dilation, dilation, (taps - 1) * dilation - padding_low, stride};
  }

  std::vector<int64_t> sources() const {
    std::vector<int64_t> result;
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t k = 0; k < taps; ++k) {
        const int64_t at = o * stride + k * dilation - padding_low;
        result.push_back(at >= 0 && at % in_dilation == 0 && at / in_dilation < in ? at / in_dilation : -1);
      }
    }
    return result;
  }

  // Outputs that read neighbouring inputs, or inputs at the distance of the taps, are a phase together.
  std::vector<Phase> phases() const {
    if (in_dilation == 1) {
      const int64_t step = stride == 1 ? std::min(dilation, out) : 1;
      std::vector<Phase> result;
      for (int64_t o = 0; o < step; ++o) {
        result.push_back({o, step, o * stride - padding_low, step * stride, dilation, 0, 1, taps});
      }
      return result;
    }
    std::vector<Phase> result;
    const int64_t common = std::gcd(dilation, in_dilation), tap_step = in_dilation / common;
    for (int64_t o = 0; o < std::min(in_dilation, out); ++o) {
      int64_t k = 0;
      while (k < std::min(taps, tap_step) && (o + k * dilation - padding_low) % in_dilation) ++k;
      const int64_t count = k < tap_step ? (taps - k + tap_step - 1) / tap_step : 0;
      result.push_back({o, in_dilation, (o + k * dilation - padding_low) / in_dilation, 1, dilation / common, k, tap_step,
                        count});
    }
    return result;
  }
};

// Three spatial dimensions, missing ones of extent 1 in front.
struct Problem {
  int64_t batch, channels;
  bool bf16;
  Dimension dimensions[3];

  Problem(const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y)
      : batch(y.shape[0]), channels(y.shape.back()), bf16(y.dtype == DType::BF16) {
    const size_t n = g.spatial_rank();
    for (size_t i = 0; i < n; ++i) {
      dimensions[3 - n + i] = {x.shape[i + 1],  y.shape[i + 1],      w.shape[g.rhs_spec[i + 2]], g.strides[i],
                               g.dilation[i], g.padding_low[i], 1};
    }
  }

  Problem transposed() const {
    Problem result = *this;
    for (Dimension& d : result.dimensions) d = d.transposed();
    return result;
  }

  int64_t element_bytes() const { return bf16 ? 2 : 4; }
  int64_t taps() const { return dimensions[0].taps * dimensions[1].taps * dimensions[2].taps; }
};

// A convolution of x cut into pieces of rows of its outputs, whose sums in f32 stay in the caches; of so many outputs at most.
class Pieces {
 public:
  Pieces(const Problem& problem, const void* x, std::vector<Phase> phases, int64_t longest = kElements)
      : p_(problem), x_(static_cast<const char*>(x)), phases_(std::move(phases)) {
    for (int d = 0; d < 2; ++d) sources_[d] = p_.dimensions[d].sources();
    constexpr int64_t kOutputs = 16;
    const int64_t width = p_.dimensions[2].out, most = std::min(std::max(kOutputs, kElements / p_.channels / 8 * 8), longest);
    length_ = padded(even(width, most), 8);
    per_row_ = parts(width, length_);
  }

  int64_t count() const { return p_.batch * p_.dimensions[0].out * p_.dimensions[1].out * per_row_; }
  int64_t most_elements() const { return length_ * p_.channels; }
  Args args() const {
    const Dimension& last = p_.dimensions[2];
    return {p_.bf16, p_.channels, last.in, last.taps, phases_.data(), int64_t(phases_.size())};
  }

  // f(piece, index of its first element in the tensor of outputs) for the pieces of chunk i of n.
  template <class F>
  void for_chunk(int64_t i, int64_t n, F f) const {
    std::vector<Row> rows;
    for (int64_t index = i * count() / n; index < (i + 1) * count() / n; ++index) {
      const int64_t row = index / per_row_, begin = index % per_row_ * length_;
      if (index == i * count() / n || begin == 0) find_rows(row, rows);
      const int64_t width = p_.dimensions[2].out, end = std::min(begin + length_, width);
      f(Piece{begin, end, rows.data(), int64_t(rows.size()), next_row(rows)}, (row * width + begin) * p_.channels);
    }
  }

 private:
  static constexpr int64_t kElements = 8 << 10;

  int64_t row_bytes() const { return p_.dimensions[2].in * p_.channels * p_.element_bytes(); }

  // The row of x behind these, if there is one: most often what the next outputs read first.
  const void* next_row(const std::vector<Row>& rows) const {
    if (rows.empty()) return nullptr;
    const char* next = static_cast<const char*>(rows.back().x) + row_bytes();
    return next < x_ + p_.batch * p_.dimensions[0].in * p_.dimensions[1].in * row_bytes() ? next : nullptr;
  }

  void find_rows(int64_t row, std::vector<Row>& rows) const {
    const auto& [d0, d1, d2] = p_.dimensions;
    const int64_t *from0 = &sources_[0][row / d1.out % d0.out * d0.taps], *from1 = &sources_[1][row % d1.out * d1.taps];
    const int64_t entry = row / d1.out / d0.out;
    rows.clear();
    for (int64_t k0 = 0; k0 < d0.taps; ++k0) {
      for (int64_t k1 = 0; k1 < d1.taps; ++k1) {
        if (from0[k0] < 0 || from1[k1] < 0) continue;
        rows.push_back({x_ + ((entry * d0.in + from0[k0]) * d1.in + from1[k1]) * row_bytes(), (k0 * d1.taps + k1) * d2.taps});
      }
    }
  }

  const Problem& p_;
  const char* x_;
  std::vector<Phase> phases_;
  std::vector<int64_t> sources_[2];
  int64_t length_, per_row_;
};

// f(position in a filter of shape (spatial..., channels), position in this one), whatever the order of its dimensions.
template <class F>
void for_filter(const Geometry& g, const Tensor& w, F f) {
  const Shape strides = g.filter_strides(w);
  const int64_t channels = w.shape[g.rhs_spec[0]];
  for (int64_t tap = 0; tap * channels < w.size(); ++tap) {
    int64_t at = 0, rest = tap;
    for (int64_t i = g.rhs_spec.size(); i-- > 2; rest /= w.shape[g.rhs_spec[i]]) {
      at += rest % w.shape[g.rhs_spec[i]] * strides[i];
    }
    for (int64_t c = 0; c < channels; ++c) f(tap * channels + c, at + c * strides[0]);
  }
}

std::vector<float> filter(const Geometry& g, const Tensor& w) {
  std::vector<float> result(w.size());
  for_filter(g, w, [&](int64_t i, int64_t at) { result[i] = element(w, at); });
  return result;
}

// The same with its taps in reverse.
std::vector<float> flipped_filter(const Geometry& g, const Tensor& w) {
  const int64_t channels = w.shape[g.rhs_spec[0]], last = w.size() - channels;
  std::vector<float> result(w.size());
  for_filter(g, w, [&](int64_t i, int64_t at) { result[last - i + 2 * (i % channels)] = element(w, at); });
  return result;
}

void convolve(const Problem& problem, const void* x, const std::vector<float>& w, const Epilogue& e) {
  const Pieces pieces(problem, x, problem.dimensions[2].phases());
  const Args args = pieces.args();
  const Kernels& run = kernels();
  const epilogue::Tiles tiles(e, {e.y.size() / problem.channels, problem.channels});
  const bool alone = e.activation == Activation::none && !e.scale && !e.residual;  // but for the bias
  constexpr int64_t kFewest = 32, kPieces = 16;  // of a chunk, where there are many: its rows share most of their inputs
  const int64_t chunks = std::min(std::max(kFewest, pieces.count() / kPieces), pieces.count());
  parallel_for(chunks, [&](int64_t chunk) {
    const Scratch scratch(alone ? 0 : pieces.most_elements() * sizeof(float));
    float* const sums = alone ? nullptr : scratch.as<float>();
    pieces.for_chunk(chunk, chunks, [&](const Piece& piece, int64_t at) {
      run.convolve(args, piece, w.data(), alone ? tiles.bias() : nullptr, sums, e.y.as<char>() + at * problem.element_bytes());
      if (alone) return;
      const epilogue::Tile tile = tiles.tile(sums, DType::F32, problem.channels, at, 0, problem.channels);
      epilogue::kernels().apply(tile, 0, piece.end - piece.begin);
    });
  });
}

// How the sums of a gradient of the filter are shared among threads. The cut depends on the shapes alone, so they repeat
// bit for bit. More chunks of rows mean more sums to add in the end: few outputs are enough for each of the first chunks,
// further ones must be large beside their sums. Where rows are few, channels are cut too.
struct Cut {
  int64_t rows, channels, step;

  Cut(const Problem& p, const Pieces& pieces) {
    constexpr int64_t kFewRows = 16, kMostRows = 256, kEnough = 4, kLarge = 512, kChannels = 64;
    const int64_t outputs = pieces.count() * pieces.most_elements() / p.channels, per_tap = outputs / p.taps();
    rows = std::max(std::clamp<int64_t>(per_tap / kEnough, 1, kFewRows), std::min(per_tap / kLarge, kMostRows));
    rows = std::min(rows, pieces.count());
    const int64_t blocks = parts(p.channels, kChannels);
    step = parts(blocks, std::min(parts(kFewRows, rows), blocks)) * kChannels;
    channels = parts(p.channels, step);
  }
};

bool all_one(const Shape& extents) {
  return std::all_of(extents.begin(), extents.end(), [](int64_t extent) { return extent == 1; });
}

// As measured, see "Depthwise" in benchmarks/results/kernels.md.
bool onednn_is_faster(Pass pass, const Geometry& g, const Tensor& w, const Tensor& y) {
  const bool small = w.size() <= 9 * g.groups, strided = !all_one(g.strides), dense = all_one(g.dilation);
  if (g.spatial_rank() != 2 || !onednn::is_loaded()) return false;
  switch (pass) {
    case Pass::forward: return small || strided;
    case Pass::data: return dense && (strided ? w.dtype == DType::F32 : small);
    default: return dense && small && onednn::images_per_sum(g, w, y) == y.shape[0];  // else it takes several calls
  }
}

}  // namespace

bool takes(Pass pass, const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y) {
  const bool depthwise = g.groups > 1 && g.groups == x.shape[g.lhs_spec[1]] && g.groups == w.shape[g.rhs_spec[0]];
  if (!depthwise || g.transposed() || !is_channels_last(g.lhs_spec) || !is_channels_last(g.out_spec)) return false;
  return x.size() > 0 && w.size() > 0 && y.size() > 0 && !onednn_is_faster(pass, g, w, y);
}

void forward(const Forward& f) {
  convolve(Problem(f.geometry, f.x, f.w, f.y()), f.x.data, filter(f.geometry, f.w), f.epilogue);
}

void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  convolve(Problem(geometry, dx, w, g).transposed(), g.data, flipped_filter(geometry, w), {dx});
}

void weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g, float* db) {
  const Problem problem(geometry, x, dw, g);
  const Dimension& last = problem.dimensions[2];
  constexpr int64_t kLongestSum = 256;  // in f32, one product after the other
  const Pieces pieces(problem, x.data, {{0, 1, -last.padding_low, last.stride, last.dilation, 0, 1, last.taps}}, kLongestSum);
  const Args args = pieces.args();
  const Cut cut(problem, pieces);
  const Kernels& run = kernels();
  const int64_t taps = problem.taps(), channels = problem.channels, sums = (taps + 1) * channels;
  const Scratch scratch(cut.rows * sums * sizeof(float));
  float* partial = scratch.as<float>();
  parallel_for(cut.rows * cut.channels, [&](int64_t i) {
    const int64_t row = i / cut.channels, begin = i % cut.channels * cut.step, end = std::min(begin + cut.step, channels);
    float* own = partial + row * sums;
    for (int64_t k = 0; k <= taps; ++k) std::fill(own + k * channels + begin, own + k * channels + end, 0.0f);
    pieces.for_chunk(row, cut.rows, [&](const Piece& piece, int64_t at) {
      const void* from = g.as<char>() + at * problem.element_bytes();
      run.filter_gradient(args, piece, begin, end, from, own, db ? own + taps * channels : nullptr);
    });
  });
  add_parts(partial, cut.rows, sums, partial);
  for_filter(geometry, dw, [&](int64_t i, int64_t at) { set_element(dw, at, partial[i]); });
  if (db) std::copy_n(partial + taps * channels, channels, db);
}

}  // namespace jaxfuse::conv::depthwise
