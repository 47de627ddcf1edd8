// What is used of libcudnn.so.9, found in the process at run time, so that neither its headers nor the library are needed to
// build. The numbers are those of cuDNN's binary interface; jaxfuse/runtime/cudnn/backend.py, which makes the plans, has the others.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace jaxfuse::cudnn {

using Handle = void*;

enum class Kind : int { execution_plan = 5, variant_pack = 16 };
enum class Type : int { handle = 0, int64 = 3, pointer = 6, descriptor = 15, text = 24 };
enum class Attribute : int {
  plan_handle = 400,
  plan_workspace = 402,
  plan_text = 405,
  pack_uids = 1000,
  pack_pointers = 1001,
  pack_workspace = 1003,
};

// The entry points; a status of 0 is success.
struct Api {
  int (*create)(Handle*);
  int (*set_stream)(Handle, cudaStream_t);
  int (*create_descriptor)(int, void**);
  int (*destroy_descriptor)(void*);
  int (*set_attribute)(void*, int, int, int64_t, const void*);
  int (*get_attribute)(void*, int, int, int64_t, int64_t*, void*);
  int (*finalize)(void*);
  int (*execute)(Handle, void*, void*);
  const char* (*error_string)(int);
  void (*last_error)(char*, size_t);

  // Of the libcudnn.so.9 that is loaded, or that the dynamic linker finds. Throws std::runtime_error if there is none.
  static const Api& get();
  // Throws std::runtime_error with the status and cuDNN's own words, unless the status is 0.
  void expect_success(int status, const char* what) const;
};

// A descriptor, destroyed with this object.
class Descriptor {
 public:
  explicit Descriptor(Kind kind);
  ~Descriptor() { Api::get().destroy_descriptor(pointer_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  void set(Attribute attribute, Type type, int64_t count, const void* elements);
  void finalize();
  int64_t get_int64(Attribute attribute) const;
  void* pointer() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
};

}  // namespace jaxfuse::cudnn
