// What jaxfuse/runtime/cuda.py asks of the library: its handlers by name, and what was built. It knows no kernel by name, and
// nothing here calls the driver.
#include "handler.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

std::map<std::string, jaxfuse::Handler>::const_iterator at(int i) {
  auto found = jaxfuse::handlers().cbegin();
  std::advance(found, i);
  return found;
}

}  // namespace

EXPORT int jaxfuse_cuda_count() { return int(jaxfuse::handlers().size()); }
EXPORT const char* jaxfuse_cuda_name(int i) { return at(i)->first.c_str(); }
EXPORT void* jaxfuse_cuda_handler(int i) { return reinterpret_cast<void*>(at(i)->second.execute); }

// Lines "key=value".
EXPORT const char* jaxfuse_cuda_info() {
  static const std::string text = [] {
    std::map<std::string, std::string> info = jaxfuse::facts();
    info["nvcc"] = JAXFUSE_NVCC;
    info["architectures"] = JAXFUSE_CUDA_ARCHITECTURES;
    info["ffi_api"] = std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
    std::string lines;
    for (const auto& [key, value] : info) lines += key + "=" + value + "\n";
    return lines;
  }();
  return text.c_str();
}
