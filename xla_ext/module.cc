// The Python module jaxfuse._native: hands out the FFI handlers that the kernel files registered, and says what was
// built. It knows no kernel by name.
#include <pybind11/pybind11.h>

#include "described.h"
#include "handler.h"
#include "onednn/onednn.h"
#include "parallel.h"

namespace py = pybind11;

namespace jaxfuse {

namespace {

void use_onednn(const std::string& path) {
  const std::string why_not = onednn::load(path);
  if (why_not.empty()) {
    facts().erase("no_onednn");
  } else {
    facts()["no_onednn"] = why_not;
  }
}

py::dict registrations() {
  py::dict capsules;
  for (const auto& [name, handler] : handlers()) {
    py::dict stages;
    stages["execute"] = py::capsule(reinterpret_cast<void*>(handler.execute));
    if (handler.instantiate) stages["instantiate"] = py::capsule(reinterpret_cast<void*>(handler.instantiate));
    capsules[name.c_str()] = stages;
  }
  return capsules;
}

py::dict info() {
  py::dict result;
  result["onednn"] = py::none();
  result["isa"] = onednn::isa();
  result["simd"] = "portable";
  result["compiler"] = JAXFUSE_COMPILER;
  result["ffi_api"] = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  for (const auto& [name, value] : facts()) result[name.c_str()] = value;
  result["no_cuda"] = JAXFUSE_NO_CUDA;  // empty: libjaxfuse_cuda.so was built with it
  return result;
}

}  // namespace
}  // namespace jaxfuse

PYBIND11_MODULE(_native, module) {
  module.doc() = "CPU kernels of jaxfuse as XLA FFI handlers; use them through jaxfuse.runtime.ffi.";
  module.def("load_onednn", &jaxfuse::use_onednn,
             "Opens oneDNN, the file beside this module. Where it cannot be used, `info` has `no_onednn`, the reason, and what "
             "`libraries` says is oneDNN's is refused.");
  module.def("registrations", &jaxfuse::registrations, "FFI target name -> stage -> handler capsule, for platform cpu.");
  module.def("intend_threads", &jaxfuse::ThreadPool::intend, "How many threads to start with the first call, which needs them.");
  module.def("set_num_threads", &jaxfuse::ThreadPool::resize,
             "Sets the number of threads of this process and its children. Returns the system's reason if it refuses some.");
  module.def("num_threads", &jaxfuse::max_threads, "Threads of a parallel region.");
  module.def("libraries", &jaxfuse::libraries,
             "(target, operands, results, attributes) -> whose code computes such a call: 'native', 'onednn'. Operands and results are "
             "pairs (dtype's name, shape). Raises ValueError for what the target refuses.");
  module.def("info", &jaxfuse::info, "What was built, and what it runs with on this machine.");
}
