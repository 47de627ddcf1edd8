// Convolutions whose rows are neighbouring pixels, dense layers among them: scale, bias, residual and limits meet their sums in registers.
// They have one tap, or few channels: then the taps of a line are one (conv_merged_lines.h), and the pixels overlap.
#pragma once

#include <optional>

#include "contraction.h"
#include "conv.h"
#include "conv_contraction.h"
#include "conv_limits.h"

namespace jaxfuse::conv {

class ByPixels {
 public:
  // Whether it is one of those, and faster so than by tiles of sums in memory. `gated`: each channel of each image is times a factor.
  // x may be u8, whose sums have a scale.
  static bool takes(const Forward& f, bool gated);

  explicit ByPixels(const Forward& f);

  // With a filter that is packed for one call: whether it is faster so than by oneDNN, and the convolution.
  static bool takes_unpacked(const Forward& f);
  static void forward(const Forward& f);

  // Whether the filter's elements may be times the factors: there are fewer than of x.
  static bool takes_factors(const Forward& f);

  // One that differs in where its arrays lie. `factors`: (images, channels), or null. `int8`: where x is u8.
  void run(const Forward& f, const char* panels, const float* factors = nullptr, const contracted::Int8* int8 = nullptr);

 private:
  // Where rows begin in the images and the padding around them.
  struct Rows {
    bool has_gaps;                       // between lines
    int64_t width, lines, padded_lines;  // outputs of a line; lines of them and of x in an image
    int64_t low, high, above, below;     // padding
    // Bytes: of a pixel of x; from row to row, from a line of x to the next, from one that an output reads first to the next output's.
    int64_t channels, pixel, line, step;
    int64_t taps, tap;

    int64_t place(int64_t row) const { return row / width / lines * padded_lines * line + row / width % lines * step + row % width * pixel; }
    bool has_padding() const { return low + high + above + below > 0; }
  };
  struct Part;  // some rows by some columns

  static Rows rows_of(const Forward& f);
  void pad(const Tensor& x, char zero, char* to) const;
  void multiply(const Forward& f, const char* x, const char* panels, const int32_t* offsets, const Part& part) const;
  void activate(const Epilogue& e, const Part& part) const;

  const contraction::Panels panels_;
  const std::optional<Limits> limits_;  // the activation, if it is these
  const Rows in_;
  const int64_t images_, rows_, features_;
  epilogue::Tiles epilogue_;
};

}  // namespace jaxfuse::conv
