// Memory that a call of a kernel works in.
#pragma once

#include <chrono>
#include <cstddef>

namespace jaxfuse {

// Memory for one call, 64-byte aligned, taken from a process-wide pool and given back by the destructor: a buffer that
// was used before costs no page faults. What nobody has used for kKept goes back to the system.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data_); }

  static constexpr std::chrono::seconds kKept{5};
  static void give_back_unused();

 private:
  char* data_;
  size_t capacity_;
};

}  // namespace jaxfuse
