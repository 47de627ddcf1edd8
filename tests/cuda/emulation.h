// CUDA's kernels on the CPU, block by block: each thread of a block is a fiber, and a barrier gives way to the next thread. So
// the code under test is the code that runs on a GPU, with its index arithmetic, barriers and order of sums; what is not
// seen here is a race within a warp, memory spaces, and the device's own mathematical functions.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define HOST_DEVICE inline

struct EmulatedStream;
using cudaStream_t = EmulatedStream*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* ordinal) { return *ordinal = 0, cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Fiber {
  std::unique_ptr<char[]> stack;
  jmp_buf place;  // where it gave way
  dim3 index;
  float shared_value;  // for shuffles
  bool finished;
};

inline std::vector<Fiber> fibers;
inline size_t current;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline std::mutex one_kernel;

// Not by swapcontext, which sets the signal mask by two calls of the system: there are millions of barriers.
inline void barrier() {
  if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

// A fiber runs the bodies of one block after another.
inline void run_bodies() {
  for (;;) {
    body();
    fibers[current].finished = true;
    barrier();
  }
}

// Until it gives way.
inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.stack) _longjmp(fiber.place, 1);
  constexpr size_t kStack = 64 << 10;
  fiber.stack.reset(new char[kStack]);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStack;
  makecontext(&context, run_bodies, 0);
  setcontext(&context);
}

// Every thread of the block runs to its next barrier, in turn, until all are finished.
inline void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers.resize(threads);
  for (size_t t = 0; t < threads; ++t) {
    fibers[t].finished = false;
    fibers[t].index = dim3(t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y));
  }
  for (size_t left = threads; left > 0;) {
    left = 0;
    for (size_t t = 0; t < threads; ++t) {
      if (fibers[t].finished) continue;
      current = t;
      threadIdx = fibers[t].index;
      resume(fibers[t]);
      left += !fibers[t].finished;
    }
  }
}

}  // namespace emulation

inline void __syncthreads() { emulation::barrier(); }

// Of threads of one warp, all of which must be there.
inline float __shfl_xor_sync(unsigned, float v, int distance) {
  using namespace emulation;
  fibers[current].shared_value = v;
  barrier();
  const float other = fibers[current ^ distance].shared_value;
  barrier();
  return other;
}

namespace jaxfuse::cuda {

template <class Args>
void launch(const char*, void (*kernel)(Args), dim3 grid, dim3 block, cudaStream_t, const Args& args) {
  const std::lock_guard<std::mutex> lock(emulation::one_kernel);
  gridDim = grid, blockDim = block;
  emulation::body = [&] { kernel(args); };
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        emulation::run_block(block.x * block.y * block.z);
      }
    }
  }
}

}  // namespace jaxfuse::cuda
