// Depthwise convolution's kernels, to be called by handlers. Images are (images, height, width, channels), a filter is (height, width,
// channels), both of the same dtype; per-channel vectors are f32. Every call enqueues work on the stream and returns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation.h"
#include "element.h"

namespace jaxfuse::cuda::depthwise {

// Along a dimension, output t takes place k of the window from input (t·step + low + k·reach)/spread, where there is one.
struct Axis {
  int32_t in, out, window, step, low, reach, spread;

  // The same convolution's gradient: which output took place k of the window from input t.
  Axis turned() const { return {out, in, window, spread, -low, -reach, step}; }
};

struct Args {
  Element element;
  int64_t images, channels;
  bool aligned;  // rows of tensors and vectors begin at multiples of 16 bytes
  Axis height, width;
  Activation activation;
  Parameters parameters;
  const void *x, *w;
  const float *scale, *bias;  // of z = scale·conv(x, w) + bias, or null
  void *y, *z;                // y = act(z); z or null
  const void *dy, *told;      // told: y if by_value, else z; null without an activation
  bool by_value;
  void *dx, *dz;    // dz = dy·act'(z), null without an activation
  float* partials;  // (parts, places of the window + 1, channels)
  int32_t parts;
  float *dw, *db;  // (places, channels), (channels)
};

void forward(const Args&, cudaStream_t);   // x, w -> y, [z]
void backward(const Args&, cudaStream_t);  // x, w, dy, [told] -> dx, dw, db, [dz]

}  // namespace jaxfuse::cuda::depthwise
