// Batch norm's kernels, to be called by handlers. Tensors are (rows, channels), channels last; per-channel vectors are f32;
// a mask has (channels + 7)/8 bytes for each row, lowest bit first. Every call enqueues work on the stream and returns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation.h"
#include "element.h"

namespace jaxfuse::cuda::batch_norm {

enum class Derivative { none, mask, recompute };

struct Args {
  Element element;
  int64_t rows, channels;
  bool aligned;  // rows of full-size tensors and vectors begin at multiples of 16 bytes
  Activation activation;
  Parameters parameters;
  Derivative derivative;
  const void *x, *dy, *residual;         // residual or null
  const float *center, *scale, *offset;  // of z = (x - center)·scale + offset + residual
  const float *mean, *a, *b, *c;         // of dx = a·g + b·(x - mean) + c
  const uint8_t* mask;
  uint8_t* saved_mask;  // or null
  void *y, *dx, *dresidual;  // dresidual or null
  float *partials;      // (parts, 2, channels)
  int32_t parts;
  float *first, *second;  // (channels): mean and var, or Σ g and Σ g·(x - mean)
};

void stats(const Args&, cudaStream_t);      // x -> first = mean, second = var
void apply(const Args&, cudaStream_t);      // x, [residual] -> y = act(z), [saved_mask]
void backward_stats(const Args&, cudaStream_t);  // dy, x -> first = Σ g, second = Σ g·(x - mean), g = dy·act'(z)
void backward_apply(const Args&, cudaStream_t);  // dy, x -> dx, [dresidual = g]

}  // namespace jaxfuse::cuda::batch_norm
