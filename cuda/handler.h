// What a file needs to become an XLA FFI target on CUDA: JAXFUSE_CUDA_HANDLER, and through call.h checked arguments and errors
// in words. A handler is a function `void f(const Call&, cudaStream_t)`: it checks its arguments and enqueues work on
// the stream. It must not allocate, synchronise or ask the stream anything, for XLA may be recording a CUDA graph; memory
// for intermediate results is the last result, which the caller drops.
#pragma once

#include <cuda_runtime.h>

#include "call.h"
#include "status.h"

namespace jaxfuse::cuda {

// JAXFUSE_CUDA_HANDLER(jaxfuse_norm_fwd, forward) at namespace scope registers `void forward(const Call&, cudaStream_t)`.
#define JAXFUSE_CUDA_HANDLER(target, kernel)                                                                          \
  XLA_FFI_DEFINE_HANDLER(                                                                                             \
      target##_handler,                                                                                               \
      [](cudaStream_t stream, ::xla::ffi::RemainingArgs args, ::xla::ffi::RemainingRets rets,                         \
         ::xla::ffi::Dictionary attrs) {                                                                              \
        return ::jaxfuse::guarded(#target, [&] { kernel(::jaxfuse::Call(#target, args, rets, attrs), stream); });     \
      },                                                                                                              \
      ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attrs(), \
      {::xla::ffi::Traits::kCmdBufferCompatible});                                                                    \
  static const bool target##_registered = ::jaxfuse::handlers().emplace(#target, ::jaxfuse::Handler{target##_handler}).second

}  // namespace jaxfuse::cuda
