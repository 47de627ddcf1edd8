// How our own loops use the threads (thread_pool.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>

#include "thread_pool.h"

namespace jaxfuse {

// Threads that parallel_for may use.
inline int max_threads() { return ThreadPool::instance().size(); }

// f(thread) once on every thread of a team of n (n < 1: all); thread is in [0, n). When all have ended, the first exception
// that any of them threw is thrown to the caller; the members that wait for the one that threw get ThreadPool::Abandoned.
template <class F>
void on_each_thread(F f, int n = 0) {
  struct Region {
    F& f;
    std::atomic<bool> thrown{false};
    std::exception_ptr first{};
  };
  Region region{f};
  ThreadPool& pool = ThreadPool::instance();
  const auto work = [](void* argument) {
    Region& own = *static_cast<Region*>(argument);
    try {
      own.f(ThreadPool::thread_number());
    } catch (...) {
      if (!own.thrown.exchange(true)) own.first = std::current_exception();
      ThreadPool::instance().abandon();
    }
  };
  pool.start(work, &region, n);
  work(&region);
  pool.finish();
  if (region.first) std::rethrow_exception(region.first);
}

// f(chunk) for chunk in [0, n_chunks), each once, in any order, on any thread; returns when all are done, and throws as
// on_each_thread does. What a chunk covers must depend on its index alone: which thread runs it differs from call to call,
// so sums that must repeat bit for bit are computed per chunk and added in chunk order afterwards.
//
// Every thread has a share, neighbouring chunks, the same part of the whole at every call: what one kernel of a network has written is
// in the cache of the core that reads it next. Then it takes chunks from the others' shares, one by one: a thread that was
// descheduled keeps one chunk waiting.
template <class F>
void parallel_for(int64_t n_chunks, F f) {
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t count = n_chunks < max_threads() ? (n_chunks > 1 ? n_chunks : 1) : max_threads();
  const auto shares = std::make_unique<Share[]>(count);
  for (int64_t i = 0; i < count; ++i) shares[i].next = i * n_chunks / count, shares[i].end = (i + 1) * n_chunks / count;
  on_each_thread(
      [&](int thread) {
        for (int64_t i = 0; i < count; ++i) {
          Share& share = shares[(thread + i) % count];
          while (share.next.load(std::memory_order_relaxed) < share.end) {  // a share that is done is only read
            if (const int64_t chunk = share.next.fetch_add(1, std::memory_order_relaxed); chunk < share.end) f(chunk);
          }
        }
      },
      int(count));
}

}  // namespace jaxfuse
