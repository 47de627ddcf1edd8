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
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "float_mode.h"

namespace jaxfuse {

class ThreadPool {
 public:
  using Work = void (*)(void* argument);

  // Thrown to a member of a team that waits at a barrier to which another member cannot come.
  struct Abandoned : std::exception {
    const char* what() const noexcept override { return "another thread of the team failed"; }
  };

  // The process's pool; it lives until the process ends. After a fork the child gets a new one of the same size.
  static ThreadPool& instance();

  // The size that a pool begins with. Starts nothing.
  static void intend(int n);

  // Makes n the size, of this process's pool and of those of its children, and starts the threads that are missing. Where
  // the system refuses one, the pool is as large as it could be made. Returns the system's reason, "" if there is none.
  static std::string resize(int n);

  // Threads of a team that asks for all; the processors until resize() says otherwise.
  int size() const { return size_.load(std::memory_order_relaxed); }

  // Starts work(argument) on threads 1 .. n-1 of a team and makes the caller its thread 0, which must run the work itself
  // and then call finish(). n < 1 means size(); a larger team than size() has the threads that were started before the pool
  // was made smaller, because oneDNN counts on the teams that it knows of. Inside a region the caller becomes a team of
  // one. The members of a team run at the same time, so they may wait for one another. They have the caller's
  // floating-point mode: what becomes of denormals does not depend on who computes. The work must not throw.
  void start(Work work, void* argument, int n);
  void finish();

  // Waits until every thread of the caller's team has come here. Throws Abandoned if one has abandoned the region.
  void barrier();

  // Of the region that the caller works in: it will come to no barrier again.
  void abandon();

  // Whether an invalid operation (IEEE 754's exception: a comparison with NaN, Inf - Inf, ...) happened in the caller's
  // regions, on whatever thread, since it last said forget_invalid(). Always false where the CPU is not x86.
  static void forget_invalid();
  static bool saw_invalid();

  // Of the calling thread, as OpenMP has them.
  static int thread_number();
  static int team_size();
  static bool in_parallel();

 private:
  static constexpr int kMostThreads = 1024;

  // What a worker has been given to do, and where it waits for that. A cache line of its own: a region touches only those
  // of its team, and wakes nobody else.
  struct alignas(64) Worker {
    // The team in which it has a share, or 0. Whoever exchanges it for 0 runs the share. Usually that is the worker; if it
    // has not begun when the caller is done with its own share (another process has its core), the caller takes it. No
    // share is waited for by one that has ended, so whatever waits inside them, this cannot block.
    std::atomic<int> share_of_team{0};
    std::atomic<bool> sleeping{false};
    std::atomic<int> processor{-1};  // that it was on when it last took its share
    std::mutex mutex;
    std::condition_variable wake;

    void give_share(int team);
    bool take_share(int& team);
    void wait_for_share();
  };

  ThreadPool();
  std::string grow(int n);
  void work_as(int number);
  void leave_the_callers_processor() const;

  std::atomic<int> size_{1};
  std::mutex region_;  // held from start to finish by the one caller whose region runs, and while the pool grows
  std::unique_ptr<Worker> workers_[kMostThreads];  // by thread number, from 1 on
  std::atomic<int> threads_{1};                    // workers, and a caller
  Work work_ = nullptr;
  void* argument_ = nullptr;
  FloatMode mode_{};    // the caller's
  int processor_ = -1;  // that it runs on
  std::atomic<bool> invalid_{false};
  std::atomic<bool> abandoned_{false};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_round_{0};
};

}  // namespace jaxfuse
