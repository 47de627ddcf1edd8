// Layer and RMS norm's kernels, to be called by handlers. Tensors are rows of `length`; row r has the parameters of group
// r % groups, and (rows) statistics. Every call enqueues work on the stream and returns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "element.h"

namespace jaxfuse::cuda::norm {

constexpr int64_t kLongestRow = 8192;  // elements, which the registers of a block hold

struct Args {
  Element element;
  int64_t rows, length, groups;  // rows of each group
  float inverse_length;
  bool aligned;  // rows of full-size tensors and parameters begin at multiples of 16 bytes
  bool centered, epsilon_outside;
  float epsilon;
  const float *gamma, *beta;  // (groups, length)
  const void *x, *residual;   // forward; residual or null
  void *y, *sum;              // sum = x + residual, or null
  float *mean, *rstd;         // written by forward, or null; read by backward
  const void *dy, *s, *ds;    // backward; ds, another cotangent of s, or null
  void* dx;
  float* partials;  // (parts, 2, groups·length), null: dgamma and dbeta are not wanted
  int32_t parts;    // blocks of each group
  float *dgamma, *dbeta;
};

void forward(const Args&, cudaStream_t);
void backward(const Args&, cudaStream_t);

}  // namespace jaxfuse::cuda::norm
