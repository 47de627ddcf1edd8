#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "layouts.h"
#include "onednn.h"
#include "parallel.h"
#include "scratch.h"
#include "slices.h"

namespace jaxfuse::onednn {
namespace {

using conv::Geometry;
using dnnl::algorithm;

constexpr int64_t kVector = 16;  // floats of AVX-512

enum class Direction { data = 1, weights = 2 };

Key key_of(Direction direction, const Geometry& geometry, const Tensor& x, const Tensor& w, const Tensor& y) {
  Key key{int64_t(direction)};
  for (const Tensor* t : {&x, &w, &y}) append_to(key, *t);
  append_to(key, geometry);
  return key;
}

// oneDNN wants to be told of the forward convolution that it differentiates.
dnnl::convolution_forward::primitive_desc forward_hint(const Geometry& g, const dnnl::memory::desc& x,
                                                       const dnnl::memory::desc& w, const dnnl::memory::desc& y,
                                                       ElementType type) {
  return {engine(), dnnl::prop_kind::forward_training, algorithm::convolution_direct, any_layout(x, type),
          any_layout(w, type), any_layout(y, type), g.strides, holes(g), g.padding_low, g.padding_high};
}

// The descriptor of a gradient, and the user's buffers.
template <class Descriptor>
struct Request {
  Descriptor descriptor;
  Primitive::Layouts inputs, outputs;
};

Request<dnnl::convolution_backward_data::primitive_desc> data_request(const Geometry& g, const Tensor& dx, const Tensor& kernel,
                                                                      const Tensor& dy) {
  const auto x = data(dx, g.lhs_spec), w = filter(g, kernel), y = data(dy, g.out_spec);
  const ElementType type = element_type(dy.dtype);
  return {{engine(), algorithm::convolution_direct, channels_last(x, type), any_layout(w, type), channels_last(y, type), g.strides,
           holes(g), g.padding_low, g.padding_high, forward_hint(g, x, w, y, type), attributes()},
          {{DNNL_ARG_DIFF_DST, y}, {DNNL_ARG_WEIGHTS, w}},
          {{DNNL_ARG_DIFF_SRC, x}}};
}

// Whether the filter reads single pixels, some of them only, of features that fill no whole vectors: of such oneDNN 3.2's kernel
// (jit_1x1) reads memory that was never written.
bool reads_odd_pixels(const Geometry& g, const Tensor& dw) {
  const Shape ones(g.spatial_rank(), 1), none(g.spatial_rank(), 0);
  return g.strides != ones && g.padding_low == none && g.padding_high == none &&
         dw.size() == dw.shape[g.rhs_spec[0]] * dw.shape[g.rhs_spec[1]] && dw.shape[g.rhs_spec[1]] % kVector != 0;
}

// Another kernel is taken where there is padding. So x ends at the last pixel that is read, and one of padding follows.
void pad_behind(Geometry& g, dnnl::memory::desc& x, const dnnl::memory::desc& y) {
  auto dims = x.get_dims();
  for (size_t i = 0; i < g.spatial_rank(); ++i) {
    dims[i + 2] = (y.get_dims()[i + 2] - 1) * g.strides[i] + 1;
    g.padding_high[i] = g.strides[i] > 1;
  }
  x = {dims, x.get_data_type(), x.get_strides()};
}

Request<dnnl::convolution_backward_weights::primitive_desc> weights_request(Geometry g, const Tensor& input, const Tensor& dw,
                                                                            const Tensor& dy) {
  const auto w = filter(g, dw), y = data(dy, g.out_spec);
  auto x = data(input, g.lhs_spec);
  if (reads_odd_pixels(g, dw)) pad_behind(g, x, y);
  const ElementType type = element_type(dy.dtype), dw_type = element_type(dw.dtype);
  return {{engine(), algorithm::convolution_direct, channels_last(x, type), any_layout(w, dw_type), channels_last(y, type), g.strides,
           holes(g), g.padding_low, g.padding_high, forward_hint(g, x, w, y, type), attributes()},
          {{DNNL_ARG_SRC, x}, {DNNL_ARG_DIFF_DST, y}},
          {{DNNL_ARG_DIFF_WEIGHTS, w}}};
}

template <class Gradient, class Descriptor>
SharedPrimitive make(const Request<Descriptor>& r) {
  return std::make_shared<Primitive>(r.descriptor, Gradient(r.descriptor), r.inputs, r.outputs);
}

// At stride 1 the gradient is a convolution itself, of g with the filter turned around; null where it is not, or where
// turning the filter is not a matter of whole rows.
std::optional<Geometry> turned(const Geometry& geometry, const Tensor& w) {
  Geometry t = geometry;
  std::swap(t.lhs_spec, t.out_spec);
  std::swap(t.rhs_spec[0], t.rhs_spec[1]);
  const int64_t n = geometry.spatial_rank();
  bool possible = t.rhs_spec[0] >= n && t.rhs_spec[1] >= n;
  for (int64_t d = 0; d < n; ++d) {
    const int64_t reach = (w.shape[t.rhs_spec[d + 2]] - 1) * t.dilation[d];
    for (Shape* padding : {&t.padding_low, &t.padding_high}) possible &= ((*padding)[d] = reach - (*padding)[d]) >= 0;
    possible &= t.strides[d] == 1;
  }
  return possible ? std::optional(t) : std::nullopt;
}

// The gradient in that form, where its sums are long enough to be sliced.
bool data_gradient_sliced(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  const auto forward = turned(geometry, w);
  if (!forward || slice_count(*forward, g, w, dx) == 1) return false;
  const int64_t taps = size_of(Shape(w.shape.begin(), w.shape.begin() + geometry.spatial_rank()));
  const size_t bytes = w.bytes() / taps;
  const Scratch scratch(w.bytes());
  parallel_for(taps, [&](int64_t tap) {
    std::memcpy(scratch.data() + (taps - 1 - tap) * bytes, w.as<char>() + tap * bytes, bytes);
  });
  convolve(*forward, g, {w.name, scratch.data(), w.dtype, w.shape}, dx);
  return true;
}

void weights_at_once(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  cached(key_of(Direction::weights, geometry, x, dw, g),
         [&] { return make<dnnl::convolution_backward_weights>(weights_request(geometry, x, dw, g)); })
      ->run({{DNNL_ARG_SRC, x.data}, {DNNL_ARG_DIFF_DST, g.data}, {DNNL_ARG_DIFF_WEIGHTS, dw.data}});
}

void add(const Tensor& part, const Tensor& sum) {
  constexpr int64_t kBlock = 1 << 14;
  parallel_for((sum.size() + kBlock - 1) / kBlock, [&](int64_t block) {
    const int64_t end = std::min(sum.size(), (block + 1) * kBlock);
    for (int64_t i = block * kBlock; i < end; ++i) sum.as<float>()[i] += part.as<float>()[i];
  });
}

// Over few images at a time where the sums would be long.
void weights_in_slices(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g, int64_t step) {
  const Scratch scratch(dw.bytes());
  const Tensor part{dw.name, scratch.data(), dw.dtype, dw.shape};
  for (int64_t begin = 0, batch = g.shape[0]; begin < batch; begin += step) {
    const int64_t count = std::min(step, batch - begin);
    weights_at_once(geometry, images(x, begin, count), begin ? part : dw, images(g, begin, count));
    if (begin) add(part, dw);
  }
}

}  // namespace

bool is_fast_data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  return !is_reference(data_request(geometry, dx, w, g).descriptor);
}

bool is_fast_weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const int64_t step = std::min(images_per_sum(geometry, dw, g), g.shape[geometry.out_spec[0]]);
  if (step == g.shape[geometry.out_spec[0]]) return !is_reference(weights_request(geometry, x, dw, g).descriptor);
  return !is_reference(weights_request(geometry, images(x, 0, step), dw, images(g, 0, step)).descriptor);
}

void data_gradient(const Geometry& geometry, const Tensor& dx, const Tensor& w, const Tensor& g) {
  if (data_gradient_sliced(geometry, dx, w, g)) return;
  cached(key_of(Direction::data, geometry, dx, w, g),
         [&] { return make<dnnl::convolution_backward_data>(data_request(geometry, dx, w, g)); })
      ->run({{DNNL_ARG_DIFF_DST, g.data}, {DNNL_ARG_WEIGHTS, w.data}, {DNNL_ARG_DIFF_SRC, dx.data}});
}

void weights_gradient(const Geometry& geometry, const Tensor& x, const Tensor& dw, const Tensor& g) {
  const int64_t step = images_per_sum(geometry, dw, g);
  step < g.shape[geometry.out_spec[0]] ? weights_in_slices(geometry, x, dw, g, step) : weights_at_once(geometry, x, dw, g);
}

}  // namespace jaxfuse::onednn
