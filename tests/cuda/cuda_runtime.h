// Stands in for CUDA's header where handlers are compiled for the CPU: XLA's CPU client has no stream to hand out, so the
// handlers get a null one.
#pragma once

#include "emulation.h"
#include "xla/ffi/api/ffi.h"

template <>
struct xla::ffi::CtxDecoding<xla::ffi::PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) { return nullptr; }
};
