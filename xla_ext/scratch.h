// Memory that a call of a kernel works in.
#pragma once

#include <cstddef>

namespace jaxfuse {

// Memory for one call, 64-byte aligned, taken from a process-wide pool and given back by the destructor: a buffer that
// was used before costs no page faults.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }

 private:
  char* data_;
  size_t capacity_;
};

}  // namespace jaxfuse
