// What kernels share that go over rows of channels: octets of channels across, rows down, at most 256 threads in a block.
#pragma once

#include "device.cuh"

namespace jaxfuse::cuda {

constexpr int kThreads = 256;

// Octets across, at most `widest` (a power of 2), rows down. Few across keep the sums of a block small; many across write whole
// sectors of a mask.
struct Blocks {
  dim3 block;
  int64_t tiles;

  Blocks(int64_t channels, int widest) {
    const int64_t octets = (channels + 7) / 8;
    int across = 1;
    while (across < widest && across < octets) across *= 2;
    block = dim3(across, kThreads / across);
    tiles = (octets + across - 1) / across;
  }
};

constexpr int kSumsAcross = 8;

// Where a thread is: its octet of channels.
struct Place {
  int64_t channel;
  int count;  // of its channels, at most 8; none if 0 or less

  __device__ explicit Place(int64_t channels) : channel((int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8) {
    const int64_t left = channels - channel;
    count = left < 8 ? int(left) : 8;
  }
};

template <class T>
__device__ __forceinline__ const T* row_of(const void* tensor, int64_t row, int64_t channels, int64_t channel) {
  return static_cast<const T*>(tensor) + row * channels + channel;
}

}  // namespace jaxfuse::cuda
