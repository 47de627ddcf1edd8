#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxfuse {
namespace {

// Longer than the usual gap between two kernels of a network, shorter than a scheduler's time slice.
constexpr auto kSpin = std::chrono::microseconds(60);

// Then a worker lets others have its core: from one call of a small network to the next. To be woken would take it some 40 us.
constexpr auto kYield = std::chrono::microseconds(300);

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

// The same, while others that want the core have it.
template <class Ready>
bool yield(Ready ready, std::chrono::microseconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (!ready() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  return ready();
}

// For team members that wait for one another: spins, then naps. A member that is this late has lost its core to another
// thread; only a core that falls idle makes the scheduler move it (yielding does not: 4 ms, a time slice, were lost).
template <class Ready>
void wait_until(Ready ready) {
  while (!spin(ready, 2 * kSpin)) std::this_thread::sleep_for(std::chrono::microseconds(1));
}

// Fetches what the caller has lately written to its stack, at `argument` and above: what the work reads. One after the other, as they
// are read, its lines would each take the way from core to core.
void fetch_from(const void* argument) {
  constexpr int kLines = 32, kLine = 64;
  for (int i = 0; i < kLines; ++i) __builtin_prefetch(static_cast<const char*>(argument) + i * kLine);
}

// The processor that the calling thread runs on, or -1 where the system does not say.
int processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
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

std::atomic<int> wanted_size{0};  // as resize() said last; a forked child goes by it
std::atomic<ThreadPool*> the_pool{nullptr};
std::atomic_flag making_it = ATOMIC_FLAG_INIT;

// A forked child has none of the parent's threads: it makes a pool of its own when it needs one.
[[maybe_unused]] const int forgotten_by_children = pthread_atfork(nullptr, nullptr, [] {
  the_pool = nullptr;
  making_it.clear();
});

// While one lives, threads that the caller starts take no signals that are meant for the process: Ctrl-C is Python's.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  sigset_t saved_;
};

}  // namespace

ThreadPool& ThreadPool::instance() {
  for (;;) {
    if (ThreadPool* pool = the_pool.load(std::memory_order_acquire)) return *pool;
    if (making_it.test_and_set()) {
      std::this_thread::yield();
      continue;
    }
    struct Made {
      ~Made() { making_it.clear(); }
    } made;
    if (!the_pool.load()) the_pool = new ThreadPool;
  }
}

void ThreadPool::intend(int n) { wanted_size = std::clamp(n, 1, kMostThreads); }

std::string ThreadPool::resize(int n) {
  intend(n);
  return instance().grow(wanted_size);
}

int ThreadPool::thread_number() { return depth > 1 ? 0 : number; }
int ThreadPool::team_size() { return depth > 1 ? 1 : team; }
bool ThreadPool::in_parallel() { return depth > 0 && team_size() > 1; }

void ThreadPool::forget_invalid() {
  lower_invalid_flag();
  invalid_in_region = false;
}

bool ThreadPool::saw_invalid() { return invalid_flag() || invalid_in_region; }

ThreadPool::ThreadPool() {
  const int processors = std::max(1u, std::thread::hardware_concurrency());
  grow(wanted_size ? wanted_size.load() : std::min(processors, kMostThreads));
}

std::string ThreadPool::grow(int n) {
  std::lock_guard<std::mutex> lock(region_);
  const SignalsBlocked blocked;
  std::string refused;
  try {
    for (int i = threads_; i < n; ++i) {
      workers_[i] = std::make_unique<Worker>();
      std::thread([this, i] { work_as(i); }).detach();
      threads_ = i + 1;
    }
  } catch (const std::exception& error) {  // a limit of the system, a container or a user, or no memory for a stack
    refused = error.what();
  }
  size_ = std::min<int>(n, threads_);
  return refused;
}

void ThreadPool::start(Work work, void* argument, int n) {
  if (++depth > 1) return;
  team = n < 1 ? size() : std::min<int>(n, threads_);
  number = 0;
  if (team == 1) return;
  region_.lock();
  work_ = work;
  argument_ = argument;
  mode_ = float_mode();
  processor_ = processor();
  running_.store(team - 1, std::memory_order_relaxed);
  for (int share = 1; share < team; ++share) workers_[share]->give_share(team);
}

void ThreadPool::finish() {
  if (depth > 1) {
    --depth;
    return;
  }
  if (team > 1) {
    for (int share = 1, members; share < team; ++share) {
      if (!workers_[share]->take_share(members)) continue;
      number = share;
      work_(argument_);
      running_.fetch_sub(1, std::memory_order_release);
    }
    number = 0;
    wait_until([this] { return running_.load(std::memory_order_acquire) == 0; });
    invalid_in_region |= invalid_.exchange(false, std::memory_order_relaxed);
    if (abandoned_.exchange(false, std::memory_order_relaxed)) arrived_.store(0, std::memory_order_relaxed);
    team = 1;
    region_.unlock();
  }
  depth = 0;
}

void ThreadPool::barrier() {
  const int members = team_size();
  if (members == 1) return;
  const uint32_t round = barrier_round_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
    arrived_.store(0, std::memory_order_relaxed);
    barrier_round_.fetch_add(1, std::memory_order_release);
    return;
  }
  const auto passed = [&] { return barrier_round_.load(std::memory_order_acquire) != round; };
  wait_until([&] { return passed() || abandoned_.load(std::memory_order_relaxed); });
  if (!passed()) throw Abandoned();
}

void ThreadPool::abandon() {
  if (in_parallel()) abandoned_.store(true, std::memory_order_relaxed);
}

void ThreadPool::Worker::give_share(int team) {
  share_of_team.store(team, std::memory_order_seq_cst);
  if (!sleeping.load(std::memory_order_seq_cst)) return;
  { const std::lock_guard<std::mutex> lock(mutex); }  // it sleeps, or looks once more before it does
  wake.notify_one();
}

bool ThreadPool::Worker::take_share(int& team) {
  if (!share_of_team.load(std::memory_order_relaxed)) return false;
  team = share_of_team.exchange(0, std::memory_order_acq_rel);
  return team != 0;
}

void ThreadPool::Worker::wait_for_share() {
  const auto given = [&] { return share_of_team.load(std::memory_order_seq_cst) != 0; };
  if (spin(given, kSpin) || yield(given, kYield)) return;
  std::unique_lock<std::mutex> lock(mutex);
  sleeping.store(true, std::memory_order_seq_cst);  // before the last look at the share: give_share looks the other way round
  if (!wake.wait_for(lock, 2 * Scratch::kKept, given)) {
    lock.unlock();
    Scratch::give_back_unused();  // nobody else may come by, if the process has no more calls
    lock.lock();
    wake.wait(lock, given);
  }
  sleeping.store(false, std::memory_order_relaxed);
}

// To a processor that no member of the team was on, if there is one. A thread that is woken stays where it was if Linux is too
// busy to look for an idle processor: caller and worker took turns on one for 5 ms, while the other idled.
void ThreadPool::leave_the_callers_processor() const {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < team) return;
  cpu_set_t others = allowed;
  CPU_CLR(processor_, &others);
  cpu_set_t free = others;
  for (int share = 1; share < team; ++share) CPU_CLR(workers_[share]->processor.load(std::memory_order_relaxed), &free);
  const cpu_set_t& better = CPU_COUNT(&free) > 0 ? free : others;
  if (sched_setaffinity(0, sizeof better, &better) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
#endif
}

void ThreadPool::work_as(int own_number) {
  depth = 1;
  number = own_number;
  for (Worker& self = *workers_[own_number];;) {
    self.wait_for_share();
    if (!self.take_share(team)) continue;
    if (processor() == processor_) leave_the_callers_processor();
    self.processor.store(processor(), std::memory_order_relaxed);
    fetch_from(argument_);
    set_float_mode(mode_);
    work_(argument_);
    if (invalid_flag()) invalid_.store(true, std::memory_order_relaxed);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace jaxfuse
