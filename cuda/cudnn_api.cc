#include "cudnn_api.h"

#include <dlfcn.h>

#include <stdexcept>

namespace jaxfuse::cudnn {
namespace {

Api load() {
  void* library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(std::string("libcudnn.so.9 does not load: ") + dlerror());
  Api api{};
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("libcudnn.so.9 has no ") + name);
  };
  find(api.create, "cudnnCreate");
  find(api.set_stream, "cudnnSetStream");
  find(api.create_descriptor, "cudnnBackendCreateDescriptor");
  find(api.destroy_descriptor, "cudnnBackendDestroyDescriptor");
  find(api.set_attribute, "cudnnBackendSetAttribute");
  find(api.get_attribute, "cudnnBackendGetAttribute");
  find(api.finalize, "cudnnBackendFinalize");
  find(api.execute, "cudnnBackendExecute");
  find(api.error_string, "cudnnGetErrorString");
  find(api.last_error, "cudnnGetLastErrorString");
  return api;
}

}  // namespace

const Api& Api::get() {
  static const Api api = load();
  return api;
}

void Api::expect_success(int status, const char* what) const {
  if (status == 0) return;
  char words[512] = "";
  last_error(words, sizeof words);
  throw std::runtime_error(std::string(what) + ": cuDNN says " + error_string(status) + ": " + words);
}

Descriptor::Descriptor(Kind kind) {
  const Api& api = Api::get();
  api.expect_success(api.create_descriptor(int(kind), &pointer_), "creating a descriptor");
}

void Descriptor::set(Attribute attribute, Type type, int64_t count, const void* elements) {
  const Api& api = Api::get();
  api.expect_success(api.set_attribute(pointer_, int(attribute), int(type), count, elements), "setting an attribute");
}

void Descriptor::finalize() {
  const Api& api = Api::get();
  api.expect_success(api.finalize(pointer_), "finalising a descriptor");
}

int64_t Descriptor::get_int64(Attribute attribute) const {
  const Api& api = Api::get();
  int64_t count = 0, value = 0;
  api.expect_success(api.get_attribute(pointer_, int(attribute), int(Type::int64), 1, &count, &value), "reading an attribute");
  return value;
}

}  // namespace jaxfuse::cudnn
