// CUDA's status as an exception.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace jaxfuse::cuda {

// Of what was just enqueued or asked for; names the status in CUDA's words.
inline void expect_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": CUDA says " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

}  // namespace jaxfuse::cuda
