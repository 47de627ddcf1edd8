// What may happen while XLA records a CUDA graph.
#pragma once

#include "status.h"

namespace jaxfuse::cuda {

// What allocates or loads a kernel, as the first launch of it may, would be an error then, unless this thread says that it has
// nothing to do with the recording. Work that is enqueued is recorded all the same.
class OutsideCapture {
 public:
  OutsideCapture() { exchange(); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  void exchange() { expect_success(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }

  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace jaxfuse::cuda
