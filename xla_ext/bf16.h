// bf16 in memory for code that computes in f32.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "handler.h"
#include "scratch.h"

namespace jaxfuse {

// The i-th element of a tensor of f32 or bf16; stored, it is rounded to the nearest, ties to even.
float element(const Tensor& t, int64_t i);
void set_element(const Tensor& t, int64_t i, float value);

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
