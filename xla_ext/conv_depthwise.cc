#include "conv_depthwise.h"

#include <algorithm>
#include <limits>

#include "conv_depthwise_problem.h"
#include "onednn/onednn.h"
#include "parallel.h"
#include "partial_sums.h"
#include "scratch.h"
#include "simd_level.h"

namespace jaxfuse::conv::depthwise {

const Kernels& kernels() { return choose(portable_kernels, avx2_kernels, avx512_kernels); }

std::optional<Clip> clip_of(Activation activation, const Parameters& parameters) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (activation == Activation::none) return Clip{{-kInfinity, kInfinity}, {-kInfinity, kInfinity}};
  if (activation == Activation::relu) return Clip{{0, kInfinity}, {0, kInfinity}};
  const Piecewise& f = parameters.pieces;
  if (activation != Activation::piecewise_linear || !f.clips) return std::nullopt;
  return Clip{{f.bounds[0], f.bounds[1]}, {f.offsets[0], f.offsets[2]}};
}

namespace {

// A filter as f32 of shape (spatial..., channels), where it lies if it is that; flipped: its taps in reverse.
class Filter {
 public:
  Filter(const Geometry& g, const Tensor& w, bool flipped = false) : Filter(Taps(g, w), w, flipped) {}
  const float* data() const { return data_; }

 private:
  Filter(const Taps& taps, const Tensor& w, bool flipped)
      : stays_(!flipped && w.dtype == DType::F32 && taps.are_in_order()),
        memory_(stays_ ? 0 : w.size() * sizeof(float)),
        data_(stays_ ? w.as<float>() : memory_.as<float>()) {
    for (int64_t tap = 0; !stays_ && tap < taps.count(); ++tap) {
      load(w, taps.of(flipped ? taps.count() - 1 - tap : tap), memory_.as<float>() + tap * taps.channels);
    }
  }

  const bool stays_;
  const Scratch memory_;
  const float* const data_;
};

void convolve(const Problem& problem, const void* x, const Filter& w, const Epilogue& e) {
  const Pieces pieces(problem, x, problem.dimensions[2].phases());
  const Args args = pieces.args();
  const Kernels& run = kernels();
  const epilogue::Tiles tiles(e, {e.y.size() / problem.channels, problem.channels});
  const std::optional<Clip> clip = e.scale || e.residual ? std::nullopt : clip_of(e.activation, e.parameters);
  const bool in_place = e.y.dtype == DType::F32;  // y holds the sums until the epilogue
  constexpr int64_t kFewest = 32, kPieces = 16;  // of a chunk, where there are many: its rows share most of their inputs
  const int64_t chunks = std::min(std::max(kFewest, pieces.count() / kPieces), pieces.count());
  parallel_for(chunks, [&](int64_t chunk) {
    const Scratch scratch(clip || in_place ? 0 : pieces.most_elements() * sizeof(float));
    pieces.for_chunk(chunk, chunks, [&](const Piece& piece, int64_t at) {
      char* const y = e.y.as<char>() + at * problem.element_bytes();
      if (clip) return run.convolve(args, piece, w.data(), {tiles.bias(), nullptr, y, *clip});
      float* const sums = in_place ? e.y.as<float>() + at : scratch.as<float>();
      run.convolve(args, piece, w.data(), {nullptr, sums, nullptr, {}});
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

bool is_small(const Geometry& g, const Tensor& w) { return w.size() <= 9 * g.groups; }

// A depthwise convolution with x and y channels last, none of them empty.
bool fits(const Geometry& g, const Tensor& x, const Tensor& w, const Tensor& y) {
  const bool depthwise = g.groups > 1 && g.groups == x.shape[g.lhs_spec[1]] && g.groups == w.shape[g.rhs_spec[0]];
  if (!depthwise || g.transposed() || !is_channels_last(g.lhs_spec) || !is_channels_last(g.out_spec)) return false;
  return x.size() > 0 && w.size() > 0 && y.size() > 0;
}

// Where it has no kernels for bf16 it computes in f32 between two casts, in up to five times as long.
bool onednn_has_kernels(const Geometry& g, DType dtype) {
  return g.spatial_rank() == 2 && onednn::is_loaded() && onednn::has_kernels(dtype);
}

// Whether sums become y by more than a clip.
bool curves(const Epilogue& e) { return !e.z && !clip_of(e.activation, e.parameters); }

}  // namespace

// As measured, see "Depthwise" in benchmarks/results/kernels.md; of activations with AVX-512 in benchmarks/README.md.

bool takes(const Forward& f) {
  const Geometry& g = f.geometry;
  const bool few_taps = is_small(g, f.w) || !all_one(g.strides);
  const bool onednn_is_faster = few_taps && !(curves(f.epilogue) && simd_level() == SimdLevel::avx512);
  return fits(g, f.x, f.w, f.y()) && !(onednn_has_kernels(g, f.x.dtype) && onednn_is_faster);
}

bool takes_data_gradient(const Geometry& g, const Tensor& dx, const Tensor& w, const Tensor& dy) {
  const bool onednn_is_faster = all_one(g.dilation) && (all_one(g.strides) ? is_small(g, w) : w.dtype == DType::F32);
  return fits(g, dx, w, dy) && !(onednn_has_kernels(g, dy.dtype) && onednn_is_faster);
}

bool takes_weights_gradient(const Geometry& g, const Tensor& x, const Tensor& dw, const Tensor& dy) {
  if (!fits(g, x, dw, dy)) return false;
  const bool in_one_call = onednn_has_kernels(g, dy.dtype) && onednn::images_per_sum(g, dw, dy) == dy.shape[0];
  return !(in_one_call && all_one(g.dilation) && is_small(g, dw));
}

void forward(const Forward& f) {
  convolve(Problem(f.geometry, f.x, f.w, f.y()), f.x.data, Filter(f.geometry, f.w), f.epilogue);
}

void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  convolve(Problem(geometry, dx, w, g).transposed(), g.data, Filter(geometry, w, true), {dx});
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
  const Taps places(geometry, dw);
  for (int64_t tap = 0; tap < taps; ++tap) store(partial + tap * channels, dw, places.of(tap));
  if (db) std::copy_n(partial + taps * channels, channels, db);
}

}  // namespace jaxfuse::conv::depthwise
