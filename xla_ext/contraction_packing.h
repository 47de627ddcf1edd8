// For contraction.cc: a filter as panels, and the chunks of them that a tile meets at once.
#pragma once

#include <algorithm>
#include <vector>

#include "contraction.h"

namespace jaxfuse::contraction {

// Numbers of a step.
inline int64_t per_step(DType dtype) { return kStepBytes / int64_t(ffi::ByteWidth(dtype)); }

// Lines of a panel that a tile meets at once: some taps whole, or a part of one.
struct Chunk {
  int64_t tap, taps, first, inner;  // elements [first, first + inner) of each of the taps
};

// Neighbouring ones.
struct Chunks {
  const Chunk *first, *last;  // behind the last one

  const Chunk* begin() const { return first; }
  const Chunk* end() const { return last; }
};

// All but a row's last have whole lines of the cache of it.
inline std::vector<Chunk> chunks_of(const Panels& p, int64_t per) {
  std::vector<Chunk> chunks;
  const int64_t steps = p.steps(), most = products_of(p.dtype).steps;
  const int64_t together = p.taps ? even(p.taps, std::max<int64_t>(1, most / steps)) : 1;
  const int64_t inner = together > 1 ? p.inner : padded(even(steps, most), kLineSteps) * per;
  for (int64_t tap = 0; tap < p.taps; tap += together) {
    for (int64_t first = 0; first < p.inner; first += inner) {
      chunks.push_back({tap, std::min(together, p.taps - tap), first, std::min(inner, p.inner - first)});
    }
  }
  return chunks;
}

// A filter that is packed, chunk by chunk of a panel.
class Packing {
 public:
  Packing(const Filter& filter, const Panels& panels, Layout layout)
      : f_(filter), panels_(panels), layout_(layout), per_(per_step(panels.dtype)), chunks_(chunks_of(panels, per_)) {}

  const std::vector<Chunk>& chunks() const { return chunks_; }
  // Part i of `count`.
  Chunks part(int64_t i, int64_t count) const {
    const int64_t all = chunks_.size();
    return {chunks_.data() + i * all / count, chunks_.data() + (i + 1) * all / count};
  }
  int64_t lines(const Chunk& chunk) const { return chunk.taps * parts(chunk.inner, per_); }
  const Layout& layout() const { return layout_; }

  // Of a row: how many taps meet it, their steps, and whether the last of these is not full.
  struct OfRow {
    int64_t taps, steps;
    bool is_odd;
  };
  OfRow of_row() const { return {panels_.taps, panels_.steps(), panels_.inner % per_ != 0}; }
  // Bytes from the beginning of the panels that a tile meets; and from the beginning of all.
  int64_t place(const Chunk& chunk) const { return (chunk.tap * panels_.steps() + chunk.first / per_) * layout_.line; }
  int64_t place(int64_t group) const { return group * (kernels().columns / kPanel) * panels_.bytes(); }
  int64_t count() const { return parts(panels_.columns, kernels().columns) * int64_t(chunks_.size()); }

  // One of `count` parts of all panels.
  bool pack(int64_t i, char* to) const {
    const int64_t group = i / int64_t(chunks_.size());
    const Chunk& chunk = chunks_[i % chunks_.size()];
    return pack(group, chunk, to + place(group) + place(chunk));
  }

  // The panels that a tile meets.
  bool pack(int64_t group, const Chunk& chunk, char* to) const {
    const int64_t column = group * kernels().columns, columns = std::min(kernels().columns, panels_.columns - column);
    const auto pack = panels_.dtype == DType::F32 ? kernels().pack_f32 : kernels().pack_bf16;
    bool finite = true;
    for (int64_t tap = chunk.tap; tap < chunk.tap + chunk.taps; ++tap, to += parts(chunk.inner, per_) * layout_.line) {
      const int64_t offset = f_.taps[tap] + chunk.first * f_.inner_step + column * f_.column_step;
      const void* from = static_cast<const char*>(f_.data) + offset * int64_t(ffi::ByteWidth(f_.dtype));
      finite &= pack({element_of(f_.dtype), from, f_.inner_step, f_.column_step}, columns, chunk.inner, to, layout_);
    }
    return finite;
  }

 private:
  const Filter& f_;
  const Panels panels_;
  const Layout layout_;
  const int64_t per_;
  const std::vector<Chunk> chunks_;
};

}  // namespace jaxfuse::contraction
