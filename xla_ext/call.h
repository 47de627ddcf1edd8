// What handlers for the CPU and for CUDA share: checked access to operands, results and attributes, errors in words, and the
// table of handlers. A handler is a function of a Call; it checks its arguments with the helpers here, which throw, and
// what is thrown becomes an ffi::Error naming the target.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "shape.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfuse {

namespace ffi = xla::ffi;
using DType = ffi::DataType;

inline std::string to_string(const Shape& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

inline std::string to_string(DType dtype) {
  switch (dtype) {
    case DType::F32: return "float32";
    case DType::BF16: return "bfloat16";
    case DType::F16: return "float16";
    case DType::U8: return "uint8";
    case DType::S32: return "int32";
    default: break;
  }
  std::ostringstream other;
  other << dtype;
  return other.str();
}

inline int64_t size_of(const Shape& shape) {
  int64_t size = 1;
  for (int64_t extent : shape) {
    if (__builtin_mul_overflow(size, extent, &size)) throw std::invalid_argument("shape " + to_string(shape) + " is too large");
  }
  return size;
}

// sum += a·b; false where that overflows.
inline bool add_product(int64_t a, int64_t b, int64_t& sum) {
  int64_t product;
  return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(sum, product, &sum);
}

// From one element to the next along each dimension, without gaps.
inline Shape row_major_strides(const Shape& shape) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) strides[d] = stride;
  return strides;
}

// One operand or result: row-major, `shape` is the logical shape.
struct Tensor {
  const char* name;
  void* data;
  DType dtype;
  Shape shape;

  int64_t size() const { return size_of(shape); }
  size_t bytes() const { return size() * ffi::ByteWidth(dtype); }
  template <class T>
  T* as() const { return static_cast<T*>(data); }
};

class Call {
 public:
  Call(const char* target, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs)
      : target_(target), args_(args), rets_(rets), attrs_(attrs) {}

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    std::ostringstream text;
    text << target_ << ": ";
    (text << ... << parts);
    throw std::invalid_argument(text.str());
  }

  void expect_counts(size_t operands, size_t results) const {
    if (args_.size() != operands) refuse("got ", args_.size(), " operands, expected ", operands);
    if (rets_.size() != results) refuse("got ", rets_.size(), " results, expected ", results);
  }

  size_t results() const { return rets_.size(); }

  // Where an operand or a result that was checked before lies in this call.
  void* operand_data(size_t i) const { return args_.get<ffi::AnyBuffer>(i)->untyped_data(); }
  void* result_data(size_t i) const { return (**rets_.get<ffi::AnyBuffer>(i)).untyped_data(); }

  Tensor operand(size_t i, const char* name) const {
    auto buffer = args_.get<ffi::AnyBuffer>(i);
    if (!buffer) refuse("operand ", name, " (number ", i, ") is missing");
    return tensor(*buffer, name);
  }

  Tensor result(size_t i, const char* name) const {
    auto buffer = rets_.get<ffi::AnyBuffer>(i);
    if (!buffer) refuse("result ", name, " (number ", i, ") is missing");
    return tensor(**buffer, name);
  }

  template <class T>
  T attr(const char* name) const {
    auto value = attrs_.get<T>(name);
    if (!value) refuse("attribute ", name, " is missing or of another type: ", value.error().message());
    return *value;
  }

  Shape int_array(const char* name) const {
    auto span = attr<ffi::Span<const int64_t>>(name);
    return Shape(span.begin(), span.end());
  }

  void expect_dtype(const Tensor& t, std::initializer_list<DType> allowed) const {
    std::string wanted;
    for (DType dtype : allowed) {
      if (t.dtype == dtype) return;
      wanted += (wanted.empty() ? "" : " or ") + to_string(dtype);
    }
    refuse(t.name, " has dtype ", to_string(t.dtype), ", expected ", wanted);
  }

  void expect_shape(const Tensor& t, const Shape& shape) const {
    if (t.shape != shape) refuse(t.name, " has shape ", to_string(t.shape), ", expected ", to_string(shape));
  }

  const Tensor& checked(const Tensor& t, DType dtype, const Shape& shape) const {
    expect_dtype(t, {dtype});
    expect_shape(t, shape);
    return t;
  }

 private:
  static Tensor tensor(const ffi::AnyBuffer& buffer, const char* name) {
    auto dims = buffer.dimensions();
    return {name, buffer.untyped_data(), buffer.element_type(), Shape(dims.begin(), dims.end())};
  }

  const char* target_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  ffi::Dictionary attrs_;
};

// f() with what it throws turned into an error that names the target.
template <class F>
ffi::Error guarded(const char* target, F f) {
  try {
    f();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(e.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(target) + ": out of memory");
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string(target) + ": " + e.what());
  }
}

// What runs a target; `instantiate`, or null, is run for each place of a compiled program that calls it.
struct Handler {
  XLA_FFI_Handler *execute, *instantiate = nullptr;
};

// target name -> handler, filled by static initialisers of the kernel files, read by module.cc.
inline std::map<std::string, Handler>& handlers() {
  static std::map<std::string, Handler> table;
  return table;
}

// Whose code computes the products of a call, or where it has none its sums: one of them, or several. kReference beside
// kOneDNN: of some of them oneDNN has its reference code only, which is slow without bounds.
enum Library : unsigned { kNative = 1, kOneDNN = 2, kReference = 4 };

// target name -> the libraries of a call, by what its handler goes by too. A target that is not here is native.
inline std::map<std::string, unsigned (*)(const Call&)>& choices() {
  static std::map<std::string, unsigned (*)(const Call&)> table;
  return table;
}

// What jaxfuse._native.info() says, e.g. "simd" -> "avx512", filled by static initialisers of the files that know.
inline std::map<std::string, std::string>& facts() {
  static std::map<std::string, std::string> table;
  return table;
}

}  // namespace jaxfuse
