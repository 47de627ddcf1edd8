#include "handler.h"

namespace jaxfuse {

ffi::TypeId Kept::id = {};

void Kept::register_type(const XLA_FFI_Api* api) {
  static const ffi::TypeInfo info = ffi::MakeTypeInfo<Kept>();
  [[maybe_unused]] static XLA_FFI_Error* const refused = ffi::Ffi::RegisterTypeId(api, "jaxfuse_kept", &id, info);
  // XLA says so when a program asks for what it keeps, and that is an error in words.
}

}  // namespace jaxfuse
