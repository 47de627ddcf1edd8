#include "handler.h"

namespace jaxfuse {

ffi::TypeId Kept::id = {};

void Kept::register_type(const XLA_FFI_Api* api) {
  static const bool registered = [&] {
    static constexpr std::string_view kName = "jaxfuse_kept";
    static const ffi::TypeInfo info = ffi::MakeTypeInfo<Kept>();
    return ffi::Ffi::RegisterTypeId(api, kName, &id, info) == nullptr;
  }();
  (void)registered;
}

}  // namespace jaxfuse
