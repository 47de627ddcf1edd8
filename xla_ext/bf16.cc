#include "bf16.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace jaxfuse {
namespace {

float widened(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Without a branch, so that the compiler makes vectors of a loop. A NaN stays one: rounding would carry out of its mantissa.
uint16_t narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
  return uint16_t((value == value ? rounded : quiet) >> 16);
}

bool is_bf16(const std::optional<Tensor>& t) { return t && t->dtype == DType::BF16; }

// f(begin, end) for all elements in chunks.
template <class F>
void for_chunks(int64_t size, F f) {
  constexpr int64_t kChunk = 1 << 15;
  parallel_for((size + kChunk - 1) / kChunk, [&](int64_t i) { f(i * kChunk, std::min(size, (i + 1) * kChunk)); });
}

}  // namespace

void load(const Tensor& t, const Elements& which, float* to) {
  const auto [first, step, n] = which;
  if (t.dtype == DType::F32 && step == 1) {
    std::copy_n(t.as<float>() + first, n, to);
  } else if (t.dtype == DType::F32) {
    for (int64_t i = 0; i < n; ++i) to[i] = t.as<float>()[first + i * step];
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = widened(t.as<uint16_t>()[first + i * step]);
  }
}

void store(const float* from, const Tensor& t, const Elements& which) {
  const auto [first, step, n] = which;
  if (t.dtype == DType::F32) {
    for (int64_t i = 0; i < n; ++i) t.as<float>()[first + i * step] = from[i];
  } else {
    for (int64_t i = 0; i < n; ++i) t.as<uint16_t>()[first + i * step] = narrowed(from[i]);
  }
}

std::vector<float> elements(const std::optional<Tensor>& t) {
  std::vector<float> result(t ? t->size() : 0);
  if (t) load(*t, {0, 1, t->size()}, result.data());
  return result;
}

Wide::Wide(const std::optional<Tensor>& t)
    : narrow_(is_bf16(t) ? t : std::nullopt), memory_(narrow_ ? narrow_->size() * sizeof(float) : 0), wide_(t) {
  if (narrow_) wide_->data = memory_.data(), wide_->dtype = DType::F32;
}

const Wide& Wide::load() const {
  if (!narrow_) return *this;
  for_chunks(narrow_->size(), [&](int64_t begin, int64_t end) {
    const uint16_t* from = narrow_->as<uint16_t>();
    float* to = wide_->as<float>();
    for (int64_t i = begin; i < end; ++i) to[i] = widened(from[i]);
  });
  return *this;
}

void Wide::store() const {
  if (!narrow_) return;
  for_chunks(narrow_->size(), [&](int64_t begin, int64_t end) {
    const float* from = wide_->as<float>();
    uint16_t* to = narrow_->as<uint16_t>();
    for (int64_t i = begin; i < end; ++i) to[i] = narrowed(from[i]);
  });
}

}  // namespace jaxfuse
