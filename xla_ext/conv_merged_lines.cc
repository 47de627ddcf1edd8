#include "conv_merged_lines.h"

#include <algorithm>

#include "cut.h"
#include "parallel.h"

namespace jaxfuse::conv::contracted {

bool merges_lines(const Geometry& g, const Tensor& w) {
  constexpr int64_t kFewChannels = 16;
  const size_t last = g.spatial_rank() - 1;
  const int64_t channels = w.shape[g.rhs_spec[1]];
  const Shape strides = g.filter_strides(w);
  return g.groups == 1 && !g.transposed() && !g.filter_swapped && !g.filter_features && g.dilation[last] == 1 && channels < kFewChannels &&
         w.shape[g.rhs_spec[last + 2]] > 1 && strides[last + 2] == channels * strides[1] && g.rhs_spec[last + 2] + 1 == g.rhs_spec[1];
}

Tensor with_merged_lines(const Geometry& g, Tensor w) {
  if (!merges_lines(g, w)) return w;
  int64_t& taps = w.shape[g.rhs_spec.back()];
  w.shape[g.rhs_spec[1]] *= taps, taps = 1;
  return w;
}

Tensor padded_lines(const Tensor& x, int64_t low, int64_t high, char zero, char* to) {
  const size_t last = x.shape.size() - 2;
  const int64_t pixel = x.shape.back() * int64_t(ffi::ByteWidth(x.dtype)), line = x.shape[last] * pixel, bytes = low * pixel + line + high * pixel;
  constexpr int64_t kTogether = 16;
  const int64_t lines = int64_t(x.bytes()) / line;
  parallel_for(parts(lines, kTogether), [&](int64_t task) {
    for (int64_t i = task * kTogether; i < std::min(lines, (task + 1) * kTogether); ++i) {
      char* const at = to + i * bytes;
      std::fill_n(at, low * pixel, zero);
      std::copy_n(x.as<char>() + i * line, line, at + low * pixel);
      std::fill_n(at + low * pixel + line, high * pixel, zero);
    }
  });
  Tensor padded{x.name, to, x.dtype, x.shape};
  padded.shape[last] += low + high;
  return padded;
}

}  // namespace jaxfuse::conv::contracted
