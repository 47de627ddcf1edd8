// What kernels need of the device: a launch, 16-byte accesses, sums over a warp. Without nvcc, emulation.h of the tests
// has the same names, and the same kernels run block by block on the CPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include "capture.h"

#define HOST_DEVICE __host__ __device__ __forceinline__

namespace jaxfuse::cuda {

template <class Args>
void launch(const char* name, void (*kernel)(Args), dim3 grid, dim3 block, cudaStream_t stream, const Args& args) {
  const OutsideCapture outside;
  kernel<<<grid, block, 0, stream>>>(args);
  expect_success(cudaGetLastError(), name);
}

}  // namespace jaxfuse::cuda
#else
#include "emulation.h"
#endif

namespace jaxfuse::cuda {

struct alignas(16) Words {
  uint32_t word[4];
};

__device__ __forceinline__ Words load_once(const Words* p) {
#if defined(__CUDA_ARCH__)
  Words v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
      : "l"(p));
  return v;
#else
  return *p;
#endif
}

// One access: of an assignment the compiler makes four at times. It keeps the loads after it in their place.
__device__ __forceinline__ void store_whole(Words* p, const Words& v) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
#else
  *p = v;
#endif
}

// The same sum in every lane: xor pairs, and addition commutes. `lanes` is a power of 2, at most 32.
__device__ inline float warp_sum(float v, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffffu, v, distance);
  return v;
}

}  // namespace jaxfuse::cuda
