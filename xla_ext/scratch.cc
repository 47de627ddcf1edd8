#include "scratch.h"

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

// The buffers that nobody uses now, by capacity, at most kPoolBytes of them.
struct Pool {
  std::mutex mutex;
  std::multimap<size_t, char*> idle;
  size_t idle_bytes = 0;
};

// It lives until the process ends: XLA's threads may still run handlers while static objects are destroyed.
Pool& pool() {
  static Pool& instance = *new Pool;
  return instance;
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
      data_ = smallest->second;
      pool().idle_bytes -= capacity_;
      pool().idle.erase(smallest);
      return;
    }
  }
  data_ = static_cast<char*>(std::aligned_alloc(kAlignment, capacity_));
  if (data_ == nullptr) throw std::bad_alloc();
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  std::vector<char*> surplus;
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    pool().idle.emplace(capacity_, data_);
    pool().idle_bytes += capacity_;
    while (pool().idle_bytes > kPoolBytes) {
      auto largest = std::prev(pool().idle.end());
      pool().idle_bytes -= largest->first;
      surplus.push_back(largest->second);
      pool().idle.erase(largest);
    }
  }
  for (char* buffer : surplus) std::free(buffer);
}

}  // namespace jaxfuse
