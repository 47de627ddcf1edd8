#include "described.h"

#include <pybind11/numpy.h>

#include <deque>
#include <map>

namespace py = pybind11;

namespace jaxfuse {
namespace {

XLA_FFI_DataType dtype_of(const std::string& name) {
  for (const DType dtype : {DType::F32, DType::BF16, DType::F16, DType::U8, DType::S32}) {
    if (to_string(dtype) == name) return XLA_FFI_DataType(dtype);
  }
  throw std::invalid_argument("dtype " + name + ": no handler takes it");
}

// As XLA hands over operands or results: Frame is XLA_FFI_Args or XLA_FFI_Rets, Kind the type of each of them.
template <class Frame, class Kind>
class Buffers {
 public:
  Buffers(const std::vector<Type>& types, size_t frame_size, Kind kind) : kinds_(types.size(), kind) {
    for (const auto& [dtype, shape] : types) {
      shapes_.push_back(shape);
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype_of(dtype), nullptr, int64_t(shape.size()), shapes_.back().data()});
      pointers_.push_back(&buffers_.back());
    }
    frame_ = {frame_size, nullptr, int64_t(types.size()), kinds_.data(), pointers_.data()};
  }
  Buffers(const Buffers&) = delete;

  const Frame* frame() const { return &frame_; }

 private:
  std::deque<std::vector<int64_t>> shapes_;  // its elements stay where they are
  std::deque<XLA_FFI_Buffer> buffers_;
  std::vector<void*> pointers_;
  std::vector<Kind> kinds_;
  Frame frame_;
};

class Attributes {
 public:
  explicit Attributes(const py::dict& given) {
    std::map<std::string, py::object> sorted;  // as XLA has them
    for (const auto& [name, value] : given) sorted.emplace(py::cast<std::string>(name), py::reinterpret_borrow<py::object>(value));
    for (const auto& [name, value] : sorted) {
      text_.push_back(name);
      spans_.push_back({text_.back().data(), text_.back().size()});
      names_.push_back(&spans_.back());
      py::isinstance<py::str>(value) ? add_text(py::cast<std::string>(value)) : add_numbers(name, py::array::ensure(value));
    }
    frame_ = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, int64_t(names_.size()), types_.data(), names_.data(), values_.data()};
  }
  Attributes(const Attributes&) = delete;

  const XLA_FFI_Attrs* frame() const { return &frame_; }

 private:
  void add(XLA_FFI_AttrType type, void* value) {
    types_.push_back(type);
    values_.push_back(value);
  }

  void add_text(const std::string& value) {
    text_.push_back(value);
    spans_.push_back({text_.back().data(), text_.back().size()});
    add(XLA_FFI_AttrType_STRING, &spans_.back());
  }

  void add_numbers(const std::string& name, const py::array& value) {
    const std::string kind = value ? std::string(1, value.dtype().kind()) + std::to_string(value.itemsize()) : "nothing";
    const std::map<std::string, XLA_FFI_DataType> known{
        {"b1", XLA_FFI_DataType_PRED}, {"i8", XLA_FFI_DataType_S64}, {"f4", XLA_FFI_DataType_F32}};
    const auto dtype = known.find(kind);
    if (dtype == known.end()) throw std::invalid_argument("attribute " + name + " is " + kind + ", expected bool, int64, float32 or str");
    const py::array numbers = py::array::ensure(value, py::array::c_style);
    text_.emplace_back(static_cast<const char*>(numbers.data()), numbers.nbytes());
    if (numbers.ndim() == 0) {
      scalars_.push_back({dtype->second, text_.back().data()});
      return add(XLA_FFI_AttrType_SCALAR, &scalars_.back());
    }
    arrays_.push_back({dtype->second, size_t(numbers.size()), text_.back().data()});
    add(XLA_FFI_AttrType_ARRAY, &arrays_.back());
  }

  std::deque<std::string> text_;  // of names and values, numbers as their bytes
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_Array> arrays_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> values_;
  XLA_FFI_Attrs frame_;
};

}  // namespace

std::vector<std::string> libraries(const std::string& target, const std::vector<Type>& operands, const std::vector<Type>& results,
                                   const py::dict& attributes) {
  const auto choice = choices().find(target);
  const Buffers<XLA_FFI_Args, XLA_FFI_ArgType> args(operands, XLA_FFI_Args_STRUCT_SIZE, XLA_FFI_ArgType_BUFFER);
  const Buffers<XLA_FFI_Rets, XLA_FFI_RetType> rets(results, XLA_FFI_Rets_STRUCT_SIZE, XLA_FFI_RetType_BUFFER);
  const Attributes attrs(attributes);
  const Call call(target.c_str(), ffi::RemainingArgs(args.frame(), 0), ffi::RemainingRets(rets.frame(), 0),
                  ffi::Dictionary(attrs.frame()));
  const unsigned found = choice == choices().end() ? unsigned(kNative) : choice->second(call);
  std::vector<std::string> names;
  if (found & kNative) names.push_back("native");
  if (found & kOneDNN) names.push_back("onednn");
  if (found & kReference) names.push_back("onednn_reference");
  return names;
}

}  // namespace jaxfuse
