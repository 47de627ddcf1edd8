// Convolutions over images that lie in one line of pixels, with zeros between neighbouring lines and images: what pads one pads the next,
// too. So every tap meets pixels equally far apart, as contraction.h has them for products that would copy others.
#pragma once

#include <optional>

#include "conv_contraction.h"
#include "scratch.h"

namespace jaxfuse::conv::contracted {

class FlatImages {
 public:
  // Whether the convolution, of channels last, can be computed so, and else its rows would be copied.
  static bool takes(const Forward& f);

  // By f's filter, or by the one that is packed at `panels`. `int8`: x is u8.
  FlatImages(const Forward& f, const char* panels, const Int8* int8);

  // From now on the same of other arrays, by a packed filter.
  void point_to(const Forward& f, const char* panels);

  // Whether what it wrote is right: no infinity or NaN of the filter met padding.
  bool run();

 private:
  // Along one axis: what neighbours have in between pads both.
  struct Axis {
    int64_t inputs, outputs, taps, dilation, low, high;
    int64_t gap() const { return std::max(low, high); }
    int64_t extent() const { return inputs + gap(); }
  };

  static Axis axis(const Forward& f, int64_t from_last);

  int64_t pixels() const { return images_ * lines_.extent() * pixels_.extent(); }
  int64_t before() const { return lines_.low * pixels_.extent() + pixels_.low; }  // pixels of zeros before the first
  int64_t behind() const { return lines_.high * pixels_.extent() + pixels_.high; }  // and after the last
  void point(int64_t first, int64_t count, const char** at, int64_t step) const;
  void fill(char* to) const;
  void finish(const contraction::Block& block) const;

  Tensor x_;
  const Int8* const int8_;
  const int64_t images_, features_, pixel_;  // pixel_: bytes
  const Axis lines_, pixels_;
  epilogue::Tiles epilogue_;
  const char* flat_ = nullptr;
  std::vector<contraction::Problem> problems_;
  std::optional<contraction::Plans> plans_;
};

}  // namespace jaxfuse::conv::contracted
