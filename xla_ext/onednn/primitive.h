// oneDNN's primitives: one engine, primitives that run on the user's buffers whatever layout they like inside, and a cache of
// them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dnnl.hpp"

namespace jaxfuse::onednn {

const dnnl::engine& engine();

// Whether it is oneDNN's reference code, which is slow without bounds.
inline bool is_reference(const dnnl::primitive_desc_base& descriptor) {
  return std::string(descriptor.impl_info_str()).substr(0, 3) == "ref";
}

// A oneDNN primitive, with a reorder for each argument whose layout in the user's buffer is not the primitive's.
class Primitive {
 public:
  // `user` lists (argument, layout of the user's buffer). The descriptor must ask for a user-managed scratchpad.
  using Layouts = std::vector<std::pair<int, dnnl::memory::desc>>;
  Primitive(const dnnl::primitive_desc_base& descriptor, dnnl::primitive primitive, const Layouts& inputs,
            const Layouts& outputs);
  Primitive(const Primitive&) = delete;
  Primitive& operator=(const Primitive&) = delete;
  ~Primitive();

  // `buffers` lists (argument, the user's buffer).
  void run(const std::vector<std::pair<int, const void*>>& buffers) const;

 private:
  struct Argument {
    int number;
    bool output;
    dnnl::memory::desc user, inner;
    dnnl::reorder reorder;    // empty when user == inner
    size_t inner_offset = 0;  // in the scratch memory, when reordered
    size_t reorder_scratch_offset = 0;
    dnnl::memory::desc reorder_scratch;
  };

  // oneDNN's objects of a run. Making them costs more than a small convolution: the last run's serve again.
  struct Objects;
  std::unique_ptr<Objects> objects() const;

  void add(const dnnl::primitive_desc_base& descriptor, int number, const dnnl::memory::desc& user, bool output);
  size_t reserve(size_t bytes);

  dnnl::primitive primitive_;
  std::vector<Argument> arguments_;
  dnnl::memory::desc scratchpad_;
  size_t scratchpad_offset_ = 0;
  size_t scratch_bytes_ = 0;
  mutable std::atomic<Objects*> spare_{nullptr};
};

// The primitive for a configuration, from the cache of the most recently used ones or else made now. The key must hold
// everything that `make` depends on. Null, where `make` gives null, is cached too.
using Key = std::vector<int64_t>;
using SharedPrimitive = std::shared_ptr<const Primitive>;
SharedPrimitive cached(const Key& key, const std::function<SharedPrimitive()>& make);

}  // namespace jaxfuse::onednn
