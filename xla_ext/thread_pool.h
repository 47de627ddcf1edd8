// The threads that every kernel here runs on, oneDNN's included: one pool for the process, one parallel region at a time.
//
// XLA runs independent handlers at the same time on several threads of its own. An OpenMP runtime makes a team for each
// of them, then sees more threads than cores and puts its workers to sleep after every region: waking them cost up to
// 100 us a region here, several times what a small convolution takes. Here all callers share the workers; a caller that
// comes while another's region runs waits for its turn, so there are never more busy threads than cores, and workers
// spin a moment before they sleep, because in a network the next region comes within microseconds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace jaxfuse {

class ThreadPool {
 public:
  using Work = void (*)(void* argument);

  // The process's pool; it lives until the process ends. After a fork the child gets a new one.
  static ThreadPool& instance();

  // Threads of the largest team: OMP_NUM_THREADS, else the processors that the process may run on.
  int size() const { return size_; }

  // Starts work(argument) on threads 1 .. n-1 of a team and makes the caller its thread 0, which must run the work itself
  // and then call finish(). n < 1 means all. Inside a region the caller becomes a team of one. The members of a team run
  // at the same time, so they may wait for one another.
  void start(Work work, void* argument, int n);
  void finish();

  // Waits until every thread of the caller's team has come here.
  void barrier();

  // Whether an invalid operation (IEEE 754's exception: a comparison with NaN, Inf - Inf, ...) happened in the caller's
  // regions, on whatever thread, since it last said forget_invalid(). Always false where the CPU is not x86.
  static void forget_invalid();
  static bool saw_invalid();

  // Of the calling thread, as OpenMP has them.
  static int thread_number();
  static int team_size();
  static bool in_parallel();

 private:
  ThreadPool();
  void worker(int number);
  uint64_t wait_for_work(uint64_t seen);
  bool claim(int share, uint64_t region);
  void run_share(int share);

  const int size_;
  std::mutex region_;  // held from start to finish by the one caller whose region runs
  Work work_ = nullptr;
  void* argument_ = nullptr;
  std::mutex sleep_;
  std::condition_variable wake_;
  // The region's number and, in the low kTeamBits, its team: one word, so that a worker that is late reads both of one
  // region.
  alignas(64) std::atomic<uint64_t> region_word_{0};
  // For each share (thread number) the last region in which somebody took it. Usually that is the worker of this number;
  // if it has not begun when the caller is done with its own share (another process has its core), the caller takes it.
  // No share is waited for by one that has ended, so whatever waits inside them, this cannot block.
  std::unique_ptr<std::atomic<uint64_t>[]> claimed_;
  std::atomic<bool> invalid_{false};
  alignas(64) std::atomic<int> sleeping_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_round_{0};
};

}  // namespace jaxfuse
