#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxfuse {
namespace {

// Longer than the usual gap between two kernels of a network, shorter than a scheduler's time slice.
constexpr auto kSpin = std::chrono::microseconds(60);

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Spins until ready() or for `limit`; says whether it is ready.
template <class Ready>
bool spin(Ready ready, std::chrono::microseconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return ready();
}

// For team members that wait for one another: spins, then naps. A member that is this late has lost its core to another
// thread; only a core that falls idle makes the scheduler move it (yielding does not: 4 ms, a time slice, were lost).
template <class Ready>
void wait_until(Ready ready) {
  while (!spin(ready, 2 * kSpin)) std::this_thread::sleep_for(std::chrono::microseconds(1));
}

constexpr int kTeamBits = 12;
constexpr uint64_t kTeamMask = (1u << kTeamBits) - 1;

int usable_processors() {
  int n = std::max(1u, std::thread::hardware_concurrency());
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) n = std::max(1, CPU_COUNT(&set));
#endif
  if (const char* asked = std::getenv("OMP_NUM_THREADS")) {
    if (const int wanted = std::atoi(asked); wanted > 0) n = wanted;
  }
  return std::min<int>(n, kTeamMask);
}

// What the calling thread is in its team. Regions nest, each inner one a team of one.
thread_local int number = 0;
thread_local int team = 1;
thread_local int depth = 0;  // of regions that the thread started or works in
thread_local bool invalid_in_region = false;

#if defined(__x86_64__)
bool invalid_flag() { return _mm_getcsr() & _MM_EXCEPT_INVALID; }
void lower_invalid_flag() { _mm_setcsr(_mm_getcsr() & ~_MM_EXCEPT_INVALID); }
#else
bool invalid_flag() { return false; }
void lower_invalid_flag() {}
#endif

std::atomic<ThreadPool*> the_pool{nullptr};
std::atomic_flag making_it = ATOMIC_FLAG_INIT;

}  // namespace

ThreadPool& ThreadPool::instance() {
  for (;;) {
    if (ThreadPool* pool = the_pool.load(std::memory_order_acquire)) return *pool;
    if (making_it.test_and_set()) {
      std::this_thread::yield();
      continue;
    }
    // A forked child has none of the parent's threads: it makes a pool of its own when it needs one.
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
      the_pool = nullptr;
      making_it.clear();
    });
    (void)registered;
    if (!the_pool.load()) the_pool = new ThreadPool;
    making_it.clear();
  }
}

int ThreadPool::thread_number() { return depth > 1 ? 0 : number; }
int ThreadPool::team_size() { return depth > 1 ? 1 : team; }
bool ThreadPool::in_parallel() { return depth > 0 && team_size() > 1; }

void ThreadPool::forget_invalid() {
  lower_invalid_flag();
  invalid_in_region = false;
}

bool ThreadPool::saw_invalid() { return invalid_flag() || invalid_in_region; }

ThreadPool::ThreadPool() : size_(usable_processors()), claimed_(new std::atomic<uint64_t>[size_]()) {
  for (int i = 1; i < size_; ++i) std::thread([this, i] { worker(i); }).detach();
}

void ThreadPool::start(Work work, void* argument, int n) {
  if (++depth > 1) return;
  team = n < 1 ? size_ : std::min(n, size_);
  number = 0;
  if (team == 1) return;
  region_.lock();
  work_ = work;
  argument_ = argument;
  running_.store(team - 1, std::memory_order_relaxed);
  const uint64_t last = region_word_.load(std::memory_order_relaxed);
  region_word_.store(((last >> kTeamBits) + 1) << kTeamBits | uint64_t(team), std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
}

void ThreadPool::finish() {
  if (depth > 1) {
    --depth;
    return;
  }
  if (team > 1) {
    const uint64_t region = region_word_.load(std::memory_order_relaxed);
    for (int share = 1; share < team; ++share) {
      if (claim(share, region)) run_share(share);
    }
    number = 0;
    wait_until([this] { return running_.load(std::memory_order_acquire) == 0; });
    invalid_in_region |= invalid_.exchange(false, std::memory_order_relaxed);
    team = 1;
    region_.unlock();
  }
  depth = 0;
}

bool ThreadPool::claim(int share, uint64_t region) {
  uint64_t last = claimed_[share].load(std::memory_order_relaxed);
  while (last < region) {
    if (claimed_[share].compare_exchange_weak(last, region, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void ThreadPool::run_share(int share) {
  number = share;
  work_(argument_);
  running_.fetch_sub(1, std::memory_order_release);
}

void ThreadPool::barrier() {
  const int members = team_size();
  if (members == 1) return;
  const uint32_t round = barrier_round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_round_.fetch_add(1, std::memory_order_release);
  } else {
    wait_until([this, round] { return barrier_round_.load(std::memory_order_acquire) != round; });
  }
}

uint64_t ThreadPool::wait_for_work(uint64_t seen) {
  const auto changed = [&] { return region_word_.load(std::memory_order_seq_cst) != seen; };
  if (!spin(changed, kSpin)) {
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);  // before the last look at the word: start() looks the other way round
    wake_.wait(lock, changed);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }
  return region_word_.load(std::memory_order_acquire);
}

void ThreadPool::worker(int own_number) {
  depth = 1;
  for (uint64_t seen = 0;;) {
    seen = wait_for_work(seen);
    const int members = seen & kTeamMask;
    if (own_number >= members || !claim(own_number, seen)) continue;
    team = members;
    number = own_number;
    lower_invalid_flag();
    work_(argument_);
    if (invalid_flag()) invalid_.store(true, std::memory_order_relaxed);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace jaxfuse
