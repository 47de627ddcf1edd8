#include "layouts.h"

#include <utility>

namespace jaxfuse::onednn {

using dnnl::memory;

ElementType element_type(DType dtype) { return dtype == DType::BF16 ? ElementType::bf16 : ElementType::f32; }

memory::desc data(const Tensor& t, const conv::Spec& spec) {
  return {conv::permuted(t.shape, spec), element_type(t.dtype), conv::strides_of(t, spec)};
}

memory::desc filter(const conv::Geometry& geometry, const Tensor& w) {
  const int64_t groups = geometry.groups;
  Shape dims = conv::permuted(w.shape, geometry.rhs_spec), strides = geometry.filter_strides(w);
  if (groups > 1) {  // output feature = group * (features per group) + feature in the group
    dims[0] /= groups;
    dims.insert(dims.begin(), groups);
    strides.insert(strides.begin(), dims[1] * strides[0]);
  }
  if (geometry.filter_swapped) {
    std::swap(dims[groups > 1], dims[1 + (groups > 1)]);
    std::swap(strides[groups > 1], strides[1 + (groups > 1)]);
  }
  return {dims, element_type(w.dtype), strides};
}

memory::desc per_feature(const conv::Geometry& geometry, const Tensor& v, ElementType type) {
  // Strides as of a channels-last y: where y has one row, some kernels take this for a full tensor and compare layouts.
  Shape dims(geometry.spatial_rank() + 2, 1), steps(geometry.spatial_rank() + 2, v.shape[0]);
  dims[1] = v.shape[0];
  steps[1] = 1;
  return {dims, type, steps};
}

memory::dims holes(const conv::Geometry& geometry) {
  memory::dims holes = geometry.dilation;
  for (int64_t& d : holes) --d;
  return holes;
}

memory::desc any_layout(const memory::desc& md, ElementType type) { return {md.get_dims(), type, memory::format_tag::any}; }

memory::desc channels_last(const memory::desc& md, ElementType type) {
  const memory::dims dims = md.get_dims();
  memory::dims strides(dims.size());
  strides[1] = 1;
  int64_t stride = dims[1];
  for (size_t i = dims.size(); i-- > 2; stride *= dims[i]) strides[i] = stride;
  strides[0] = stride;
  return {dims, type, strides};
}

dnnl::primitive_attr attributes() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

void append_to(Key& key, const Tensor& t) {
  key.push_back(int64_t(t.dtype));
  key.push_back(int64_t(t.shape.size()));
  key.insert(key.end(), t.shape.begin(), t.shape.end());
}

void append_to(Key& key, const conv::Geometry& g) {
  key.insert(key.end(), {g.groups, g.filter_features, g.filter_swapped});
  for (const Shape* part : {&g.strides, &g.lhs_dilation, &g.padding_low, &g.padding_high, &g.dilation, &g.lhs_spec, &g.rhs_spec,
                            &g.out_spec}) {
    key.insert(key.end(), part->begin(), part->end());
  }
}

}  // namespace jaxfuse::onednn
