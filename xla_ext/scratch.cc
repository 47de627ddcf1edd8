#include "scratch.h"

#include <pthread.h>

#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
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

// The buffers that nobody uses now, by capacity, at most kPoolBytes of them.
struct Pool {
  using Buffers = std::multimap<size_t, Idle>;
  std::mutex mutex;
  Buffers idle;
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

void free_all(const std::vector<char*>& buffers) {
  for (char* buffer : buffers) std::free(buffer);
}

}  // namespace

Scratch::Scratch(size_t bytes) : data_(nullptr), capacity_((bytes + kAlignment - 1) / kAlignment * kAlignment) {
  if (capacity_ == 0) return;
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    auto smallest = pool().idle.lower_bound(capacity_);
    // A much larger buffer stays where it is, for whoever needs all of it.
    if (smallest != pool().idle.end() && smallest->first <= 4 * capacity_) {
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
