// The Python module jaxfuse._native: hands out the FFI handlers that the kernel files registered, and says what was
// built. It knows no kernel by name.
#include <pybind11/pybind11.h>

#include "handler.h"
#include "parallel.h"

namespace py = pybind11;

namespace jaxfuse {
namespace {

py::dict registrations() {
  py::dict capsules;
  const bool no_onednn = facts().count("no_onednn");
  for (const auto& [name, handler] : handlers()) {
    if (no_onednn && name.rfind("jaxfuse_conv", 0) == 0) continue;
    capsules[name.c_str()] = py::capsule(reinterpret_cast<void*>(handler));
  }
  return capsules;
}

py::dict info() {
  py::dict result;
  result["onednn"] = py::none();
  result["isa"] = py::none();
  result["simd"] = "portable";
  result["threads"] = max_threads();
  result["compiler"] = JAXFUSE_COMPILER;
  result["ffi_api"] = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  for (const auto& [name, value] : facts()) result[name.c_str()] = value;
#ifdef JAXFUSE_NO_ONEDNN
  result["no_onednn"] = JAXFUSE_NO_ONEDNN;
#endif
  result["no_cuda"] = JAXFUSE_NO_CUDA;  // empty: libjaxfuse_cuda.so was built with it
  return result;
}

}  // namespace
}  // namespace jaxfuse

PYBIND11_MODULE(_native, module) {
  module.doc() = "CPU kernels of jaxfuse as XLA FFI handlers; use them through jaxfuse.ffi.";
  module.def("registrations", &jaxfuse::registrations, "FFI target name -> handler capsule, for platform cpu.");
  module.def("info", &jaxfuse::info, "What was built, and what it runs with on this machine.");
}
