// What the handlers of one op read off a call: tensors of x's dtype and shape, vectors, memory for partial sums.
#pragma once

#include "element.h"
#include "handler.h"

namespace jaxfuse::cuda {

// Args has `element` and `aligned`, which stays true while every tensor begins at 16 bytes.
template <class Args>
class Reader {
 public:
  Args args{};

  Reader(const Call& call, const Tensor& x) : call_(call), x_(x) {
    call.expect_dtype(x, {DType::F32, DType::BF16, DType::F16});
    args.element = x.dtype == DType::F32 ? Element::f32 : x.dtype == DType::BF16 ? Element::bf16 : Element::f16;
  }

  void* full(const Tensor& t) { return shaped(t, x_.shape); }

 protected:
  // Of x's dtype.
  void* shaped(const Tensor& t, const Shape& shape) { return at_16_bytes(call_.checked(t, x_.dtype, shape).data); }
  float* numbers(const Tensor& t, const Shape& shape) {
    return static_cast<float*>(at_16_bytes(call_.checked(t, DType::F32, shape).data));
  }
  // (parts, 2, width): two sums of each of so many parts of the rows.
  void partial_sums(const Tensor& t, int64_t width) {
    const int64_t parts = t.shape.empty() ? 0 : t.shape[0];
    if (parts < 1 || parts > 65535) call_.refuse(t.name, " has shape ", to_string(t.shape), ", expected 1 to 65535 parts");
    args.partials = call_.checked(t, DType::F32, {parts, 2, width}).template as<float>();
    args.parts = int32_t(parts);
  }

  const Call& call_;
  const Tensor x_;

 private:
  void* at_16_bytes(void* data) {
    args.aligned &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
    return data;
  }
};

}  // namespace jaxfuse::cuda
