// bf16 in memory for code that computes in f32.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "handler.h"
#include "scratch.h"

namespace jaxfuse {

// Elements first + i·step, i < n, of a tensor of f32 or bf16; stored, they are rounded to the nearest, ties to even.
struct Elements {
  int64_t first, step, n;
};
void load(const Tensor& t, const Elements& which, float* to);
void store(const float* from, const Tensor& t, const Elements& which);

// All of them; empty without a tensor.
std::vector<float> elements(const std::optional<Tensor>& t);

// A tensor as f32 for a library that has no fast bf16 on this CPU: the tensor itself if it is f32, else memory of its own,
// which `load` fills from the tensor and `store` rounds into it, on all threads. Nothing without a tensor.
class Wide {
 public:
  explicit Wide(const std::optional<Tensor>& t);

  const Wide& load() const;
  void store() const;
  const std::optional<Tensor>& tensor() const { return wide_; }

 private:
  const std::optional<Tensor> narrow_;  // if it is bf16
  const Scratch memory_;
  std::optional<Tensor> wide_;
};

}  // namespace jaxfuse
