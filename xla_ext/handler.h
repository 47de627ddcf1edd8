// What every kernel file needs to become an XLA FFI target on the CPU: JAXFUSE_HANDLER, and through call.h checked
// arguments and errors in words. A kernel is a function `void f(const Call&)`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "call.h"
#include "element.h"
#include "float_mode.h"

namespace jaxfuse {

// Of a tensor of one of these types.
inline Element element_of(DType dtype) {
  return dtype == DType::F32 ? Element::f32 : dtype == DType::BF16 ? Element::bf16 : Element::f16;
}

// Asks for 2 MB pages behind a large result. XLA maps a program's large values anew for every run, and first touches in
// 4 KB pages cost more than writing them (170,000 faults, 150 of 850 ms, in a ResNet-50 training step). Only advice. It stays
// with addresses that the heap keeps: what lies there later gets such pages too, so never more memory than this result had.
inline void advise_huge_pages(void* data, size_t bytes) {
#ifdef __linux__
  constexpr uintptr_t kPage = 2 << 20;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

inline void advise_huge_pages(ffi::RemainingRets results) {
  for (size_t i = 0; i < results.size(); ++i) {
    if (auto buffer = results.get<ffi::AnyBuffer>(i)) advise_huge_pages((*buffer)->untyped_data(), (*buffer)->size_bytes());
  }
}

// JAXFUSE_HANDLER(jaxfuse_relu, relu) at namespace scope registers `void relu(const Call&)`. It runs as XLA's own kernels do,
// with denormals flushed, and so do the threads that it starts (thread_pool.h).
#define JAXFUSE_HANDLER(target, kernel)                                                                            \
  XLA_FFI_DEFINE_HANDLER(                                                                                          \
      target##_handler,                                                                                            \
      [](::xla::ffi::RemainingArgs args, ::xla::ffi::RemainingRets rets, ::xla::ffi::Dictionary attrs) {            \
        return ::jaxfuse::guarded(#target, [&] {                                                                   \
          const ::jaxfuse::DenormalsFlushed mode;                                                                  \
          ::jaxfuse::advise_huge_pages(rets);                                                                      \
          kernel(::jaxfuse::Call(#target, args, rets, attrs));                                                     \
        });                                                                                                        \
      },                                                                                                           \
      ::xla::ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());                                            \
  static const bool target##_registered = ::jaxfuse::handlers().emplace(#target, ::jaxfuse::Handler{target##_handler}).second

// What a place of a compiled program keeps from one call to the next: all that shapes and attributes say, which stay as they are.
struct Kept {
  static ffi::TypeId id;

  struct Object {
    virtual ~Object() = default;
  };
  std::atomic<Object*> idle{nullptr};  // whoever exchanges it for null has it: calls at the same time have one each

  Kept() = default;
  ~Kept() { delete idle.load(); }

  // JAX registers types after handlers, where XLA wants them before: so a handler does it, when XLA asks what it is.
  static void register_type(const XLA_FFI_Api* api);
};

// `T(call)` checks a call, and `run(call)` runs it or one like it.
template <class T>
void run_kept(Kept& kept, const Call& call) {
  std::unique_ptr<T> object(static_cast<T*>(kept.idle.exchange(nullptr)));
  if (!object) object = std::make_unique<T>(call);
  object->run(call);
  delete kept.idle.exchange(object.release());
}

template <XLA_FFI_Handler* handler>
XLA_FFI_Error* with_type(XLA_FFI_CallFrame* frame) {
  Kept::register_type(frame->api);
  return handler(frame);
}

// JAXFUSE_KEEPING_HANDLER(jaxfuse_conv_fwd, Forward) registers a class as run_kept has it.
#define JAXFUSE_KEEPING_HANDLER(target, Class)                                                                           \
  XLA_FFI_DEFINE_HANDLER(                                                                                               \
      target##_instantiate,                                                                                             \
      []() -> ::xla::ffi::ErrorOr<std::unique_ptr<::jaxfuse::Kept>> { return std::make_unique<::jaxfuse::Kept>(); },      \
      ::xla::ffi::Ffi::BindInstantiate());                                                                               \
  XLA_FFI_DEFINE_HANDLER(                                                                                               \
      target##_handler,                                                                                                 \
      [](::jaxfuse::Kept* kept, ::xla::ffi::RemainingArgs args, ::xla::ffi::RemainingRets rets,                          \
         ::xla::ffi::Dictionary attrs) {                                                                                 \
        return ::jaxfuse::guarded(#target, [&] {                                                                        \
          const ::jaxfuse::DenormalsFlushed mode;                                                                       \
          ::jaxfuse::advise_huge_pages(rets);                                                                           \
          ::jaxfuse::run_kept<Class>(*kept, ::jaxfuse::Call(#target, args, rets, attrs));                                \
        });                                                                                                             \
      },                                                                                                                \
      ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::State<::jaxfuse::Kept>>().RemainingArgs().RemainingRets().Attrs());         \
  static const bool target##_registered = ::jaxfuse::handlers().emplace(#target, ::jaxfuse::Handler{                      \
      ::jaxfuse::with_type<target##_handler>, ::jaxfuse::with_type<target##_instantiate>}).second

// JAXFUSE_CHOICE(jaxfuse_conv_fwd, libraries) at namespace scope registers `unsigned libraries(const Call&)`, which reads no
// memory of the call.
#define JAXFUSE_CHOICE(target, libraries) static const bool target##_chooses = ::jaxfuse::choices().emplace(#target, libraries).second

}  // namespace jaxfuse
