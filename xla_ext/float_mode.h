// The floating-point mode of a thread: its rounding, its masks, and whether denormals are flushed to zero.
#pragma once

#include <cstdint>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace jaxfuse {

#if defined(__SSE__)
using FloatMode = unsigned;
constexpr FloatMode kFlushDenormals = 0x8040;  // FTZ | DAZ
inline FloatMode float_mode() { return _mm_getcsr() & ~unsigned(_MM_EXCEPT_MASK); }
inline void set_float_mode(FloatMode mode) { _mm_setcsr(mode); }  // lowers the sticky flags too
#elif defined(__aarch64__)
using FloatMode = uint64_t;
constexpr FloatMode kFlushDenormals = 1 << 24;  // FZ
inline FloatMode float_mode() {
  FloatMode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
inline void set_float_mode(FloatMode mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
using FloatMode = unsigned;
constexpr FloatMode kFlushDenormals = 0;
inline FloatMode float_mode() { return 0; }
inline void set_float_mode(FloatMode) {}
#endif

// While one of these lives, the thread flushes denormals, as XLA's own kernels do.
class DenormalsFlushed {
 public:
  DenormalsFlushed() : saved_(float_mode()) { set_float_mode(saved_ | kFlushDenormals); }
  ~DenormalsFlushed() { set_float_mode(saved_); }
  DenormalsFlushed(const DenormalsFlushed&) = delete;

 private:
  const FloatMode saved_;
};

}  // namespace jaxfuse
