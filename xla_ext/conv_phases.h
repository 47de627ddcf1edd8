// What outputs of a convolution read along one axis of the input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jaxfuse::conv::contracted {

// What outputs of one phase read along an axis: output first + j·step reads, by each of the taps, the input j·stride + shift. Where
// the input is dilated by d (lhs_dilation), outputs that are d apart meet the same taps and are one phase; else there is one.
struct Phase {
  struct Tap {
    int64_t number, shift;
  };
  int64_t inputs, first, step, count, stride;
  std::vector<Tap> taps;

  bool is_inside(const Tap& tap, int64_t output) const {
    const int64_t at = output * stride + tap.shift;
    return at >= 0 && at < inputs;
  }

  bool meets_padding() const {
    return count > 0 && std::any_of(taps.begin(), taps.end(), [&](const Tap& tap) { return !is_inside(tap, 0) || !is_inside(tap, count - 1); });
  }

  // The same outputs in parts, each with the taps that lie inside for all of them.
  std::vector<Phase> without_padding() const {
    std::vector<Phase> parts;
    for (int64_t begin = 0, end; begin < count; begin = end) {
      const auto is_like = [&](int64_t output) {
        return std::all_of(taps.begin(), taps.end(), [&](const Tap& tap) { return is_inside(tap, output) == is_inside(tap, begin); });
      };
      for (end = begin + 1; end < count && is_like(end);) ++end;
      Phase part{inputs, first + begin * step, step, end - begin, stride, {}};
      for (const Tap& tap : taps) {
        if (is_inside(tap, begin)) part.taps.push_back({tap.number, tap.shift + begin * stride});
      }
      parts.push_back(part);
    }
    return parts;
  }
};

struct Axis {
  int64_t inputs = 1, outputs = 1, taps = 1, stride = 1, dilation = 1, lhs_dilation = 1, padding_low = 0;

  // Whether each output reads the input of its number.
  bool is_one_tap() const { return taps == 1 && stride == 1 && lhs_dilation == 1 && padding_low == 0 && inputs == outputs; }

  Phase phase(int64_t first) const {
    Phase phase{inputs, first, lhs_dilation, (outputs - first + lhs_dilation - 1) / lhs_dilation, stride, {}};
    for (int64_t tap = 0; tap < taps; ++tap) {
      const int64_t at = first + tap * dilation - padding_low;
      if (at % lhs_dilation == 0) phase.taps.push_back({tap, at / lhs_dilation});
    }
    return phase;
  }

  // All of them; in parts that meet no padding if there is to be none.
  std::vector<Phase> phases(bool padded) const {
    std::vector<Phase> all;
    for (int64_t first = 0; first < lhs_dilation; ++first) {
      const Phase whole = phase(first);
      const std::vector<Phase> parts = padded ? std::vector<Phase>{whole} : whole.without_padding();
      all.insert(all.end(), parts.begin(), parts.end());
    }
    return all;
  }
};

}  // namespace jaxfuse::conv::contracted
