// Depthwise convolution's kernels, to be called by handlers. Images are (images, height, width, channels), a filter is (height, width,
// channels), both of the same dtype; per-channel vectors are f32. Every call enqueues work on the stream and returns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation.h"
#include "element.h"

namespace jaxfuse::cuda::depthwise {

// Along a dimension, output t reads for tap k of the window the input (t·stride + low + k·rhs_dilation)/lhs_dilation, if there is one.
struct Axis {
  int32_t in, out, window, stride, low, rhs_dilation, lhs_dilation;

  // The transposed convolution, which is the gradient: which output read input t for tap k.
  Axis transposed() const { return {out, in, window, lhs_dilation, -low, -rhs_dilation, stride}; }
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
  const void *dy, *saved_activation;  // y if derivative_from_y, else z; null without an activation
  bool derivative_from_y;
  void *dx, *dz;    // dz = dy·act'(z), null without an activation
  float* partials;  // (parts, taps + 1, channels)
  int32_t parts;
  float *dw, *db;  // (taps, channels), (channels)
};

void forward(const Args&, cudaStream_t);   // x, w -> y, [z]
void backward(const Args&, cudaStream_t);  // x, w, dy, [saved activation] -> dx, dw, db, [dz]

}  // namespace jaxfuse::cuda::depthwise
