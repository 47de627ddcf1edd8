// A depthwise convolution as its loops see it: which inputs an output reads, pieces of rows for threads, taps of a filter.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "bf16.h"
#include "conv.h"
#include "conv_depthwise_kernels.h"
#include "cut.h"

namespace jaxfuse::conv::depthwise {

// The loops for this machine.
const Kernels& kernels();

// The activation as a clip, if it is one.
std::optional<Clip> clip_of(Activation activation, const Parameters& parameters);

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
    return {p_.bf16, p_.channels, last.in, last.taps, phases_.data(), int64_t(phases_.size()), p_.channels};
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

// The first element of each tap of a filter, and the distance of its channels.
struct Taps {
  std::vector<int64_t> first;
  int64_t channels, step;

  Taps(const Geometry& g, const Tensor& w) : channels(w.shape[g.rhs_spec[0]]) {
    const Shape strides = g.filter_strides(w);
    step = strides[0];
    for (int64_t tap = 0; tap * channels < w.size(); ++tap) {
      int64_t at = 0, rest = tap;
      for (int64_t i = g.rhs_spec.size(); i-- > 2; rest /= w.shape[g.rhs_spec[i]]) {
        at += rest % w.shape[g.rhs_spec[i]] * strides[i];
      }
      first.push_back(at);
    }
  }

  int64_t count() const { return first.size(); }
  Elements of(int64_t tap) const { return {first[tap], step, channels}; }
  bool are_in_order() const {
    int64_t at = -channels;
    return step == 1 && std::all_of(first.begin(), first.end(), [&](int64_t next) { return next == (at += channels); });
  }
};

}  // namespace jaxfuse::conv::depthwise
