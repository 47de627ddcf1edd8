#include "library.h"

#include <dlfcn.h>
#include <link.h>

#include <iterator>
#include <stdexcept>

#include "dnnl.hpp"
#include "handler.h"
#include "onednn.h"

// Every function of oneDNN's that this module calls. Linked in the ordinary way they would be served by the first library of
// the process that has them; here each jumps to an address that load() finds in the one library that it opened.
#define FUNCTIONS(F)                                                                                                   \
  F(dnnl_convolution_backward_data_primitive_desc_create)                                                              \
  F(dnnl_convolution_backward_weights_primitive_desc_create)                                                           \
  F(dnnl_convolution_forward_primitive_desc_create)                                                                    \
  F(dnnl_deconvolution_forward_primitive_desc_create)                                                                  \
  F(dnnl_engine_create)                                                                                                \
  F(dnnl_engine_destroy)                                                                                               \
  F(dnnl_get_effective_cpu_isa)                                                                                        \
  F(dnnl_matmul_primitive_desc_create)                                                                                 \
  F(dnnl_memory_create_v2)                                                                                             \
  F(dnnl_memory_desc_clone)                                                                                            \
  F(dnnl_memory_desc_create_with_strides)                                                                              \
  F(dnnl_memory_desc_create_with_tag)                                                                                  \
  F(dnnl_memory_desc_destroy)                                                                                          \
  F(dnnl_memory_desc_equal)                                                                                            \
  F(dnnl_memory_desc_get_size_v2)                                                                                      \
  F(dnnl_memory_desc_query)                                                                                            \
  F(dnnl_memory_desc_query_v2)                                                                                         \
  F(dnnl_memory_destroy)                                                                                               \
  F(dnnl_memory_set_data_handle_v2)                                                                                    \
  F(dnnl_post_ops_append_binary)                                                                                       \
  F(dnnl_post_ops_append_eltwise)                                                                                      \
  F(dnnl_post_ops_append_sum)                                                                                          \
  F(dnnl_post_ops_create)                                                                                              \
  F(dnnl_post_ops_destroy)                                                                                             \
  F(dnnl_post_ops_len)                                                                                                 \
  F(dnnl_primitive_attr_create)                                                                                        \
  F(dnnl_primitive_attr_destroy)                                                                                       \
  F(dnnl_primitive_attr_set_post_ops)                                                                                  \
  F(dnnl_primitive_attr_set_scratchpad_mode)                                                                           \
  F(dnnl_primitive_create)                                                                                             \
  F(dnnl_primitive_desc_destroy)                                                                                       \
  F(dnnl_primitive_desc_query)                                                                                         \
  F(dnnl_primitive_desc_query_md)                                                                                      \
  F(dnnl_primitive_destroy)                                                                                            \
  F(dnnl_primitive_execute)                                                                                            \
  F(dnnl_reorder_primitive_desc_create)                                                                                \
  F(dnnl_stream_create)                                                                                                \
  F(dnnl_stream_destroy)                                                                                               \
  F(dnnl_stream_wait)                                                                                                  \
  F(dnnl_version)

#define TRAMPOLINE(name)                                                                                            \
  extern "C" {                                                                                                      \
  __attribute__((visibility("hidden"), used)) void* jaxfuse_at_##name = nullptr;                                    \
  }                                                                                                                 \
  asm(".text\n.globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name                              \
      ":\n\tendbr64\n\tjmp *jaxfuse_at_" #name "(%rip)\n.size " #name ", .-" #name "\n");
FUNCTIONS(TRAMPOLINE)

namespace jaxfuse::onednn {
namespace {

struct Function {
  const char* name;
  void** address;
};

#define FUNCTION(name) {#name, &jaxfuse_at_##name},
const Function kFunctions[] = {FUNCTIONS(FUNCTION)};

std::string version_text(int major, int minor, int patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

std::string version_of(void* library) {
  const auto version = reinterpret_cast<const dnnl_version_t* (*)()>(dlsym(library, "dnnl_version"));
  if (!version) return "none that it says";
  return version_text(version()->major, version()->minor, version()->patch);
}

// Throws std::runtime_error where the library cannot be used.
void open(const std::string& path) {
  const auto refuse = [&](const std::string& why) { throw std::runtime_error(path + ": " + why); };
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(dlerror());
  const std::string wanted = version_text(DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH), found = version_of(library);
  if (found != wanted) refuse("its version is " + found + ", and this was built and tested with " + wanted);
  void* addresses[std::size(kFunctions)];
  for (size_t i = 0; i < std::size(kFunctions); ++i) {
    addresses[i] = dlsym(library, kFunctions[i].name);
    if (!addresses[i]) refuse(std::string("it has no function ") + kFunctions[i].name);
  }
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map)) refuse(dlerror());
  if (const std::string why_not = take_over(*map); !why_not.empty()) refuse(why_not);
  for (size_t i = 0; i < std::size(kFunctions); ++i) *kFunctions[i].address = addresses[i];
  facts()["onednn"] = found;
}

}  // namespace

bool is_loaded() { return jaxfuse_at_dnnl_version; }

void require() {
  if (!is_loaded()) throw std::runtime_error("oneDNN would compute this, and is not loaded");
}

std::string load(const std::string& path) {
  try {
    if (!is_loaded()) open(path);
    return "";
  } catch (const std::exception& problem) {
    return problem.what();
  }
}

const char* isa() {
  if (!is_loaded()) return nullptr;
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41: return "sse41";
    case dnnl::cpu_isa::avx: return "avx";
    case dnnl::cpu_isa::avx2: return "avx2";
    case dnnl::cpu_isa::avx2_vnni: return "avx2_vnni";
    case dnnl::cpu_isa::avx2_vnni_2: return "avx2_vnni_2";
    case dnnl::cpu_isa::avx512_core: return "avx512_core";
    case dnnl::cpu_isa::avx512_core_vnni: return "avx512_core_vnni";
    case dnnl::cpu_isa::avx512_core_bf16: return "avx512_core_bf16";
    case dnnl::cpu_isa::avx512_core_fp16: return "avx512_core_fp16";
    case dnnl::cpu_isa::avx512_core_amx: return "avx512_core_amx";
    default: return "another";
  }
}

bool has_avx512() {
  if (!is_loaded()) return false;
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::sse41:
    case dnnl::cpu_isa::avx:
    case dnnl::cpu_isa::avx2:
    case dnnl::cpu_isa::avx2_vnni:
    case dnnl::cpu_isa::avx2_vnni_2: return false;
    default: return true;
  }
}

bool has_bf16() {
  if (!has_avx512()) return false;
  const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
  return isa != dnnl::cpu_isa::avx512_core && isa != dnnl::cpu_isa::avx512_core_vnni;
}

}  // namespace jaxfuse::onednn
