#include "scratch.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <vector>

namespace jaxfuse {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kPoolBytes = size_t{1} << 30;

using Clock = std::chrono::steady_clock;

struct Idle {
  char* data;
  Clock::time_point since;
};

// The buffer that a thread used last. It stays with the thread, which finds it without a lock, and in its core's caches. Whoever exchanges
// `data` for null has the buffer: the thread, or another one that gives back what nobody uses.
struct alignas(64) Nearest {
  static constexpr size_t kMostBytes = 1 << 20;
  std::atomic<char*> data{nullptr};
  size_t capacity = 0;  // the thread's own
  std::atomic<Clock::time_point> since{Clock::time_point()};
};

// The buffers that nobody uses now, by capacity, at most kPoolBytes of them, and those that threads keep near.
struct Pool {
  using Buffers = std::multimap<size_t, Idle>;
  std::mutex mutex;
  Buffers idle;
  std::set<std::unique_ptr<Nearest>> nearest;
  size_t idle_bytes = 0;
  Clock::time_point swept = Clock::now();

  Idle take(Buffers::iterator buffer) {
    const Idle taken = buffer->second;
    idle_bytes -= buffer->first;
    idle.erase(buffer);
    return taken;
  }

  // Those that nobody has used since `limit`.
  void take_unused(Clock::time_point limit, std::vector<char*>& taken) {
    for (const auto& of_thread : nearest) {
      taken.push_back(nullptr);
      if (of_thread->since.load(std::memory_order_relaxed) < limit) taken.back() = of_thread->data.exchange(nullptr);
    }
    for (auto at = idle.begin(); at != idle.end();) {
      const auto buffer = at++;
      if (buffer->second.since < limit) move_to(taken, buffer);
    }
  }

  // Where the list cannot grow the buffer stays.
  void move_to(std::vector<char*>& taken, Buffers::iterator buffer) {
    taken.push_back(nullptr);
    taken.back() = take(buffer).data;
  }
};

// It lives until the process ends: XLA's threads may still run handlers while static objects are destroyed. A fork waits
// until nobody changes it, so that the child can use it.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
}

[[maybe_unused]] const int whole_in_children = pthread_atfork(
    [] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); }, [] { pool().mutex.unlock(); });

// At the end of the thread that it belongs to.
void leave(void* nearest) {
  std::free(static_cast<Nearest*>(nearest)->data.exchange(nullptr));
  const std::lock_guard<std::mutex> lock(pool().mutex);
  auto& all = pool().nearest;
  all.erase(std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.get() == nearest; }));
}

// Of this thread, or null where there is no memory for it. A forked child has those of its parent's threads too.
Nearest* nearest() {
  static pthread_key_t key;
  static const bool has_key = pthread_key_create(&key, leave) == 0;
  if (!has_key) return nullptr;
  if (void* own = pthread_getspecific(key)) return static_cast<Nearest*>(own);
  try {
    auto made = std::make_unique<Nearest>();
    if (pthread_setspecific(key, made.get()) != 0) return nullptr;
    Nearest* const own = made.get();
    const std::lock_guard<std::mutex> lock(pool().mutex);
    pool().nearest.insert(std::move(made));
    return own;
  } catch (const std::bad_alloc&) {
    pthread_setspecific(key, nullptr);
    return nullptr;
  }
}

void free_all(const std::vector<char*>& buffers) {
  for (char* buffer : buffers) std::free(buffer);
}

}  // namespace

Scratch::Scratch(size_t bytes) : data_(nullptr), capacity_((bytes + kAlignment - 1) / kAlignment * kAlignment) {
  if (capacity_ == 0) return;
  // A much larger buffer stays where it is, for whoever needs all of it.
  const auto fits = [&](size_t capacity) { return capacity_ <= capacity && capacity <= 4 * capacity_; };
  Nearest* const near = nearest();
  if (near && fits(near->capacity)) data_ = near->data.exchange(nullptr);
  if (data_) {
    capacity_ = near->capacity;
    return;
  }
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    auto smallest = pool().idle.lower_bound(capacity_);
    if (smallest != pool().idle.end() && fits(smallest->first)) {
      capacity_ = smallest->first;
      // Of several the one that was used last: more of it is in the caches, and the others grow old.
      data_ = pool().take(std::prev(pool().idle.upper_bound(capacity_))).data;
      return;
    }
  }
  data_ = static_cast<char*>(std::aligned_alloc(kAlignment, capacity_));
  if (data_ == nullptr) throw std::bad_alloc();
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  const Clock::time_point now = Clock::now();
  Nearest* const near = nearest();
  if (near && capacity_ <= Nearest::kMostBytes) {
    near->since.store(now, std::memory_order_relaxed);
    std::swap(capacity_, near->capacity);
    if (!(data_ = near->data.exchange(data_))) return;
  }
  std::vector<char*> surplus;
  bool is_idle = false;
  try {
    std::lock_guard<std::mutex> lock(pool().mutex);
    pool().idle.emplace(capacity_, Idle{data_, now});
    pool().idle_bytes += capacity_;
    is_idle = true;
    if (now - pool().swept > kKept) {
      pool().take_unused(now - kKept, surplus);
      pool().swept = now;
    }
    while (pool().idle_bytes > kPoolBytes) pool().move_to(surplus, std::prev(pool().idle.end()));
  } catch (const std::bad_alloc&) {  // of a list's element: the next one to come will clear up
  }
  if (!is_idle) std::free(data_);
  free_all(surplus);
}

void Scratch::give_back_unused() {
  std::vector<char*> unused;
  try {
    std::lock_guard<std::mutex> lock(pool().mutex);
    pool().take_unused(Clock::now() - kKept, unused);
  } catch (const std::bad_alloc&) {
  }
  free_all(unused);
}

}  // namespace jaxfuse
