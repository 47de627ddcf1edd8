#include "conv_depthwise.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "conv_depthwise_kernels.h"
#include "parallel.h"
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
  int64_t items, channels;
  bool bf16;
  Dimension dimensions[3];

  Problem(const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y)
      : items(y.shape[0]), channels(y.shape.back()), bf16(y.dtype == DType::BF16) {
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

  int64_t taps() const { return dimensions[0].taps * dimensions[1].taps * dimensions[2].taps; }
};

// What the loops are called with, and the tables that it points to.
struct Tables {
  std::vector<int64_t> sources[2];
  std::vector<Phase> phases;
  Args args;

  Tables(const Problem& p, const void* x, std::vector<Phase> phases) : phases(std::move(phases)) {
    const auto& [d0, d1, d2] = p.dimensions;
    sources[0] = d0.sources(), sources[1] = d1.sources();
    args = {p.bf16, p.channels, {{d0.in, d0.out, d0.taps, sources[0].data()}, {d1.in, d1.out, d1.taps, sources[1].data()}},
            d2.in, d2.out, d2.taps, this->phases.data(), int64_t(this->phases.size()), x};
  }
  Tables(const Tables&) = delete;
};

// The outputs in pieces of rows whose sums in f32 stay in the caches.
struct Pieces {
  int64_t rows0, rows1, width, length, per_row, count;

  explicit Pieces(const Problem& p)
      : rows0(p.dimensions[0].out), rows1(p.dimensions[1].out), width(p.dimensions[2].out) {
    constexpr int64_t kPieceElements = 8 << 10, kLeast = 16;
    const int64_t most = std::max(kLeast, kPieceElements / p.channels);
    per_row = (width + most - 1) / most;
    length = (width + per_row - 1) / per_row;
    length = (length + 7) / 8 * 8;
    per_row = (width + length - 1) / length;
    count = p.items * rows0 * rows1 * per_row;
  }

  Piece operator[](int64_t i) const {
    const int64_t begin = i % per_row * length, row = i / per_row;
    return {row / rows1 / rows0, row / rows1 % rows0, row % rows1, begin, std::min(begin + length, width)};
  }

  // The piece's first element in the tensor of outputs.
  int64_t at(const Piece& p, int64_t channels) const {
    return (((p.item * rows0 + p.row0) * rows1 + p.row1) * width + p.begin) * channels;
  }

  // The first piece of chunk number i of n.
  int64_t begin(int64_t i, int64_t n) const { return i * count / n; }
};

// f(place in a filter of shape (spatial..., channels), place in this one), whatever the order of its dimensions.
template <class F>
void for_filter(const Geometry& g, const Tensor& w, F f) {
  const auto stride = [&](int64_t i) { return size_of(Shape(w.shape.begin() + g.rhs_spec[i] + 1, w.shape.end())); };
  const int64_t channels = w.shape[g.rhs_spec[0]], channel_stride = stride(0);
  for (int64_t tap = 0; tap * channels < w.size(); ++tap) {
    int64_t at = 0, rest = tap;
    for (int64_t i = g.rhs_spec.size(); i-- > 2; rest /= w.shape[g.rhs_spec[i]]) {
      at += rest % w.shape[g.rhs_spec[i]] * stride(i);
    }
    for (int64_t c = 0; c < channels; ++c) f(tap * channels + c, at + c * channel_stride);
  }
}

float value(const Tensor& t, int64_t i) {
  return t.dtype == DType::F32 ? t.as<float>()[i] : from_bf16(t.as<uint16_t>()[i]);
}

std::vector<float> filter(const Geometry& g, const Tensor& w) {
  std::vector<float> result(w.size());
  for_filter(g, w, [&](int64_t i, int64_t at) { result[i] = value(w, at); });
  return result;
}

// The same with its taps in reverse.
std::vector<float> turned_filter(const Geometry& g, const Tensor& w) {
  const int64_t channels = w.shape[g.rhs_spec[0]], last = w.size() - channels;
  std::vector<float> result(w.size());
  for_filter(g, w, [&](int64_t i, int64_t at) { result[last - i + 2 * (i % channels)] = value(w, at); });
  return result;
}

void convolve(const Problem& problem, const void* x, const std::vector<float>& w, const Tensor& y, const Epilogue& e) {
  const Tables tables(problem, x, problem.dimensions[2].phases());
  const Pieces pieces(problem);
  const Kernels& run = kernels();
  auto* finish = choose(conv::portable_kernels, conv::avx2_kernels, conv::avx512_kernels).epilogue;
  const bool alone = e.activation == Activation::none && !e.scale && !e.residual;  // but for the bias
  const size_t element = problem.bf16 ? 2 : 4;
  const int64_t chunks = std::min<int64_t>(32, pieces.count);
  parallel_for(chunks, [&](int64_t chunk) {
    const DenormalsFlushed mode;
    const onednn::Scratch scratch(alone ? 0 : pieces.length * problem.channels * sizeof(float));
    float* sums = alone ? nullptr : reinterpret_cast<float*>(scratch.data());
    for (int64_t i = pieces.begin(chunk, chunks); i < pieces.begin(chunk + 1, chunks); ++i) {
      const Piece piece = pieces[i];
      const int64_t at = pieces.at(piece, problem.channels);
      char* out = y.as<char>() + at * element;
      run.convolve(tables.args, piece, w.data(), alone ? e.bias : nullptr, sums, out);
      if (alone) continue;
      const void* residual = e.residual ? static_cast<const char*>(e.residual) + at * element : nullptr;
      finish({problem.bf16, problem.channels, 1, e.activation, e.alpha, sums, true, e.scale, e.bias, residual, out}, 0,
             (piece.end - piece.begin) * problem.channels);
    }
  });
}

// How the sums of a gradient of the filter are shared among threads. The cut depends on the shapes alone, so they repeat
// bit for bit. More chunks of rows mean more sums to add in the end; where rows are few, channels are cut too.
struct Cut {
  int64_t rows, channels, step;

  Cut(const Problem& p, const Pieces& pieces) {
    constexpr int64_t kMostRows = 16, kChannels = 64;
    const int64_t outputs = pieces.count * pieces.length;
    rows = std::min(std::clamp<int64_t>(outputs / (4 * p.taps()), 1, kMostRows), pieces.count);
    const int64_t blocks = (p.channels + kChannels - 1) / kChannels;
    channels = std::min((kMostRows + rows - 1) / rows, blocks);
    step = (blocks + channels - 1) / channels * kChannels;
    channels = (p.channels + step - 1) / step;
  }
};

void store(const Tensor& t, int64_t i, float sum) {
  if (t.dtype == DType::F32) {
    t.as<float>()[i] = sum;
  } else {
    t.as<uint16_t>()[i] = to_bf16(sum);
  }
}

}  // namespace

bool takes(const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y) {
  const auto channels_last = [](const Spec& spec) {
    bool last = spec[1] == int64_t(spec.size()) - 1 && spec[0] == 0;
    for (size_t i = 2; i < spec.size(); ++i) last &= spec[i] == int64_t(i) - 1;
    return last;
  };
  return g.groups > 1 && g.groups == x.shape[g.lhs_spec[1]] && g.groups == w.shape[g.rhs_spec[0]] &&
         channels_last(g.lhs_spec) && channels_last(g.out_spec) && x.size() > 0 && w.size() > 0 && y.size() > 0;
}

void forward(const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y, const Epilogue& epilogue) {
  convolve(Problem(g, x, w, y), x.data, filter(g, w), y, epilogue);
}

void data_gradient(const Geometry& g, const Tensor& dx, const Tensor& w, const Tensor& dy, const void* gradient) {
  convolve(Problem(g, dx, w, dy).transposed(), gradient, turned_filter(g, w), dx,
           {Activation::none, 0, nullptr, DType::F32, nullptr, nullptr, nullptr});
}

void weights_gradient(const Geometry& g, const Tensor& x, const Tensor& dw, const Tensor& dy, const void* gradient,
                      float* db) {
  const Problem problem(g, x, dw, dy);
  const Dimension& last = problem.dimensions[2];
  const Tables tables(problem, x.data, {{0, 1, -last.padding_low, last.stride, last.dilation, 0, 1, last.taps}});
  const Pieces pieces(problem);
  const Cut cut(problem, pieces);
  const Kernels& run = kernels();
  const int64_t taps = problem.taps(), channels = problem.channels, sums = (taps + 1) * channels;
  const size_t element = problem.bf16 ? 2 : 4;
  const onednn::Scratch scratch(cut.rows * sums * sizeof(float));
  float* partial = reinterpret_cast<float*>(scratch.data());
  parallel_for(cut.rows * cut.channels, [&](int64_t i) {
    const DenormalsFlushed mode;
    const int64_t row = i / cut.channels, begin = i % cut.channels * cut.step, end = std::min(begin + cut.step, channels);
    float* own = partial + row * sums;
    for (int64_t k = 0; k <= taps; ++k) std::fill(own + k * channels + begin, own + k * channels + end, 0.0f);
    for (int64_t p = pieces.begin(row, cut.rows); p < pieces.begin(row + 1, cut.rows); ++p) {
      const Piece piece = pieces[p];
      const void* dy_piece = static_cast<const char*>(gradient) + pieces.at(piece, channels) * element;
      run.filter_gradient(tables.args, piece, begin, end, dy_piece, own, db ? own + taps * channels : nullptr);
    }
  });
  parallel_for(taps + 1, [&](int64_t k) {
    for (int64_t c = k * channels; c < (k + 1) * channels; ++c) {
      double total = 0;
      for (int64_t row = 0; row < cut.rows; ++row) total += partial[row * sums + c];
      partial[c] = float(total);
    }
  });
  for_filter(g, dw, [&](int64_t i, int64_t at) { store(dw, at, partial[i]); });
  if (db) std::copy_n(partial + taps * channels, channels, db);
}

}  // namespace jaxfuse::conv::depthwise
