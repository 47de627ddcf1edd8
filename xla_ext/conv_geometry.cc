#include <algorithm>
#include <limits>
#include <string>

#include "activation_attr.h"
#include "conv.h"

namespace jaxfuse::conv {
namespace {

Spec checked_spec(const Call& call, const char* name, size_t rank) {
  Spec spec = call.int_array(name), sorted = spec;
  std::sort(sorted.begin(), sorted.end());
  bool permutation = sorted.size() == rank;
  for (size_t i = 0; permutation && i < rank; ++i) permutation = sorted[i] == int64_t(i);
  if (!permutation) call.refuse(name, " is ", to_string(spec), ", expected a permutation of 0..", rank - 1);
  return spec;
}

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // so that no product of two of them overflows

Shape checked_extents(const Call& call, const char* name, size_t count, int64_t least) {
  Shape extents = call.int_array(name);
  if (extents.size() != count) call.refuse(name, " has ", extents.size(), " entries, expected ", count);
  for (int64_t extent : extents) {
    if (extent < least || extent > kMost) call.refuse(name, " is ", to_string(extents), ", expected entries from ", least, " to ", kMost);
  }
  return extents;
}

}  // namespace

Shape permuted(const Shape& values, const Spec& spec) {
  Shape result;
  for (int64_t position : spec) result.push_back(values[position]);
  return result;
}

Shape strides_of(const Tensor& t, const Spec& spec) { return permuted(row_major_strides(t.shape), spec); }

Geometry::Geometry(const Call& call) {
  const size_t n = call.int_array("window_strides").size();
  if (n < 1 || n > 3) call.refuse("window_strides has ", n, " entries, expected 1 to 3 spatial dimensions");
  strides = checked_extents(call, "window_strides", n, 1);
  lhs_dilation = checked_extents(call, "lhs_dilation", n, 1);
  const int64_t least = transposed() ? -kMost : 0;  // see check()
  padding_low = checked_extents(call, "padding_low", n, least);
  padding_high = checked_extents(call, "padding_high", n, least);
  dilation = checked_extents(call, "rhs_dilation", n, 1);
  lhs_spec = checked_spec(call, "lhs_spec", n + 2);
  rhs_spec = checked_spec(call, "rhs_spec", n + 2);
  out_spec = checked_spec(call, "out_spec", n + 2);
  groups = call.attr<int64_t>("feature_group_count");
  if (groups < 1) call.refuse("feature_group_count is ", groups, ", expected at least 1");
}

void Geometry::check(const Call& call, const Tensor& x, const Tensor& w, const Tensor& y) const {
  for (const Tensor* t : {&x, &w, &y}) {
    if (t->shape.size() != strides.size() + 2) {
      call.refuse(t->name, " has shape ", to_string(t->shape), ", expected ", strides.size() + 2, " dimensions");
    }
  }
  const Shape in = permuted(x.shape, lhs_spec), kernel = permuted(w.shape, rhs_spec);
  if (kernel[0] % groups) {
    call.refuse(w.name, " has ", kernel[0], " output features, not divisible by feature_group_count ", groups);
  }
  if (in[1] != kernel[1] * groups) {
    call.refuse(w.name, " has shape ", to_string(w.shape), ": ", kernel[1], " input features times ", groups,
                " groups, but ", x.name, " has ", in[1], " features");
  }
  Shape out = y.shape;
  out[out_spec[0]] = in[0];
  out[out_spec[1]] = kernel[0];
  for (size_t i = 0; i < strides.size(); ++i) {
    const int64_t window = kernel[i + 2] == 0 ? 0 : (kernel[i + 2] - 1) * dilation[i] + 1;
    const int64_t dilated = in[i + 2] == 0 ? 0 : (in[i + 2] - 1) * lhs_dilation[i] + 1;
    const int64_t room = dilated + padding_low[i] + padding_high[i] - window;
    out[out_spec[i + 2]] = room < 0 ? 0 : room / strides[i] + 1;
  }
  call.expect_shape(y, out);
  if (!transposed()) return;
  const Shape ones(strides.size(), 1);
  if (strides != ones) call.refuse("window_strides is ", to_string(strides), " with lhs_dilation, expected ", to_string(ones));
  for (size_t i = 0; i < strides.size(); ++i) {
    const int64_t reach = (kernel[i + 2] - 1) * dilation[i];
    if (padding_low[i] > reach || padding_high[i] >= reach + lhs_dilation[i]) {
      call.refuse("padding ", padding_low[i], " and ", padding_high[i], " with lhs_dilation, expected at most ", reach,
                  " and ", reach + lhs_dilation[i] - 1);
    }
  }
}

bool Geometry::transposed() const {
  return std::any_of(lhs_dilation.begin(), lhs_dilation.end(), [](int64_t d) { return d != 1; });
}

bool Geometry::strided() const {
  return std::any_of(strides.begin(), strides.end(), [](int64_t s) { return s != 1; });
}

bool Geometry::is_pointwise(const Tensor& w) const {
  const Shape none(spatial_rank(), 0);
  return taps(w) == 1 && !strided() && !transposed() && padding_low == none && padding_high == none;
}

// y[o] = Σ x[i]·w[t] over i·d + low = o + t·r is, with t' = k - 1 - t, one over o + (k - 1)·r - low = i·d + t'·r.
Geometry Geometry::adjoint(const Tensor& w) const {
  Geometry a = *this;
  std::swap(a.lhs_spec, a.out_spec);
  std::swap(a.strides, a.lhs_dilation);
  if (groups == 1) {
    std::swap(a.rhs_spec[0], a.rhs_spec[1]);
  } else {
    a.filter_swapped = !filter_swapped;
  }
  for (size_t i = 0; i < strides.size(); ++i) {
    const int64_t reach = (w.shape[rhs_spec[i + 2]] - 1) * dilation[i];
    a.padding_low[i] = reach - padding_low[i];
    a.padding_high[i] = std::max<int64_t>(0, reach - padding_high[i]);  // pixels that no window reaches need no padding
  }
  return a;
}

Shape Geometry::filter_strides(const Tensor& w) const {
  Shape buffer = w.shape;
  if (filter_features) buffer[rhs_spec[1]] = filter_features;
  return permuted(row_major_strides(buffer), rhs_spec);
}

Forward forward_of(const Call& call, const Tensor& w, size_t filters) {
  const bool has_scale = call.attr<bool>("has_scale"), has_bias = call.attr<bool>("has_bias"),
             has_residual = call.attr<bool>("has_residual"), save_z = call.attr<bool>("save_z");
  size_t next = 1 + filters;
  call.expect_counts(next + has_scale + has_bias + has_residual, 1 + save_z);
  Forward f{Geometry(call), call.operand(0, "x"), w,
            {call.result(0, "y"), activation_attr(call), parameters_attr(call), {}, {}, {}, call.attr<bool>("residual_last")}};
  Epilogue& e = f.epilogue;
  call.expect_dtype(f.x, {DType::F32, DType::BF16});
  if (f.w.dtype != DType::F32 || f.x.dtype != DType::BF16) call.expect_dtype(f.w, {f.x.dtype});
  call.expect_dtype(e.y, {f.x.dtype, DType::F32});
  f.geometry.check(call, f.x, f.w, e.y);
  const Shape features{e.y.shape[f.geometry.out_spec[1]]};
  if (has_scale) e.scale = call.checked(call.operand(next++, "scale"), DType::F32, features);
  if (has_bias) {
    e.bias = call.operand(next++, "bias");
    call.expect_dtype(*e.bias, {DType::F32, f.x.dtype});
    call.expect_shape(*e.bias, features);
  }
  if (has_residual) e.residual = call.checked(call.operand(next++, "residual"), e.y.dtype, e.y.shape);
  if (save_z) e.z = call.checked(call.result(1, "z"), e.y.dtype, e.y.shape);
  return f;
}

void point_to(Forward& f, const Call& call, size_t filters) {
  Epilogue& e = f.epilogue;
  f.x.data = call.operand_data(0), e.y.data = call.result_data(0);
  size_t next = 1 + filters;
  for (std::optional<Tensor>* t : {&e.scale, &e.bias, &e.residual}) {
    if (*t) (*t)->data = call.operand_data(next++);
  }
  if (e.z) e.z->data = call.result_data(1);
}

bool is_channels_last(const Spec& spec) {
  bool last = spec[0] == 0 && spec[1] == int64_t(spec.size()) - 1;
  for (size_t i = 2; i < spec.size(); ++i) last &= spec[i] == int64_t(i) - 1;
  return last;
}

bool is_features_last(const Spec& spec) {
  const int64_t n = int64_t(spec.size()) - 2;
  bool last = spec[0] == n + 1 && spec[1] == n;
  for (int64_t i = 0; i < n; ++i) last &= spec[i + 2] == i;
  return last;
}

}  // namespace jaxfuse::conv
