// How our own loops use the threads (thread_pool.h).
#pragma once

#include <atomic>
#include <cstdint>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "thread_pool.h"

namespace jaxfuse {

// XLA flushes denormals on its threads but the pool's threads do not: while one of these lives, they are flushed on any.
class DenormalsFlushed {
#ifdef __SSE__
 public:
  DenormalsFlushed() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~DenormalsFlushed() { _mm_setcsr(saved_); }
  DenormalsFlushed(const DenormalsFlushed&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  const unsigned saved_;
#endif
};

// Threads that parallel_for may use.
inline int max_threads() { return ThreadPool::instance().size(); }

// f(thread) once on every thread of a team of n (n < 1: all); thread is in [0, n). f must not throw.
template <class F>
void on_each_thread(F f, int n = 0) {
  const auto work = [](void* argument) { (*static_cast<F*>(argument))(ThreadPool::thread_number()); };
  ThreadPool& pool = ThreadPool::instance();
  pool.start(work, &f, n);
  work(&f);
  pool.finish();
}

// f(chunk) for chunk in [0, n_chunks), each once, in any order, on any thread; returns when all are done. f must not
// throw. What a chunk covers must depend on its number alone: which thread runs it differs from call to call, so sums
// that must repeat bit for bit are kept per chunk and added in chunk order afterwards.
template <class F>
void parallel_for(int64_t n_chunks, F f) {
  // Taken one by one: a thread that was descheduled keeps one chunk waiting, not its whole share.
  std::atomic<int64_t> next{0};
  on_each_thread(
      [&](int) {
        for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < n_chunks;) f(chunk);
      },
      n_chunks < max_threads() ? int(n_chunks > 1 ? n_chunks : 1) : 0);
}

}  // namespace jaxfuse
