// The gradient of filters with one input each in any layout, and of several filters for an input, by the loops for depthwise
// convolutions: of x and g they get copies, channels last, in which each filter has an input of its own.
#include "conv_depthwise.h"
#include "parallel.h"
#include "scratch.h"

namespace jaxfuse::conv::depthwise {
namespace {

class Copy {
 public:
  Copy(const Geometry& geometry, const Tensor& t, const Spec& spec, int64_t channels)
      : tensor_{t.name, nullptr, t.dtype, {t.shape[spec[0]]}}, scratch_(t.bytes() / t.shape[spec[1]] * channels) {
    const size_t n = geometry.spatial_rank();
    const auto strides = strides_of(t, spec);
    const int64_t repeats = channels / t.shape[spec[1]], columns = t.shape[spec[n + 1]];
    for (size_t i = 0; i < n; ++i) tensor_.shape.push_back(t.shape[spec[i + 2]]);
    tensor_.shape.push_back(channels);
    tensor_.data = scratch_.data();
    parallel_for(tensor_.size() / columns / channels, [&](int64_t row) {
      float* to = tensor_.as<float>() + row * columns * channels;
      const float* from = t.as<float>();
      for (size_t i = n - 1; i-- > 0; row /= t.shape[spec[i + 2]]) from += row % t.shape[spec[i + 2]] * strides[i + 2];
      from += row * strides[0];
      for (int64_t column = 0; column < columns; ++column, from += strides[n + 1]) {
        for (int64_t c = 0; c < channels; ++c) *to++ = from[c / repeats * strides[1]];
      }
    });
  }

  const Tensor& tensor() const { return tensor_; }

 private:
  Tensor tensor_;
  Scratch scratch_;
};

}  // namespace

bool has_single_inputs(const Geometry& g, const Tensor& w) {
  return g.groups > 1 && g.inputs_per_group(w) == 1 && w.shape[g.rhs_spec[1]] == 1;
}

void weights_gradient_of_copies(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const int64_t channels = dw.shape[geometry.rhs_spec[0]];
  const Copy own_x(geometry, x, geometry.lhs_spec, channels), own_g(geometry, g, geometry.out_spec, channels);
  weights_gradient(geometry, own_x.tensor(), dw, own_g.tensor(), nullptr);
}

}  // namespace jaxfuse::conv::depthwise
