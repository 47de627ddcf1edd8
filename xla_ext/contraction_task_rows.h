// For contraction.cc: the rows of a task as its products read them.
#pragma once

#include <algorithm>
#include <vector>

#include "contraction_packing.h"
#include "scratch.h"

namespace jaxfuse::contraction {

class TaskRows {
 public:
  // Row i under tap t begins at at[t·rows + i]. They meet so many groups of panels.
  TaskRows(const Products& products, const Packing& packing, const char* const* at, int64_t rows, int64_t groups)
      : products_(products), packing_(packing), at_(at), rows_(rows), chunk_bytes_(chunk_bytes()), is_kept_(groups > 1),
        is_copied_(products.copy && !lie_evenly()),
        stride_((is_kept_ ? int64_t(packing.chunks().size()) : 1) * chunk_bytes_ + kLineBytes),
        copies_(is_copied_ ? kept_rows() * stride_ : 0) {
    for (int64_t i = 0; is_copied_ && i < kept_rows(); ++i) copied_at_.push_back(copies_.data() + i * stride_);
  }

  const char* const* at(const Chunk& chunk) const { return at_ + chunk.tap * rows_; }

  bool are_copied() const { return is_copied_; }

  // Such a tile of `count` rows from `row` on, as its products read them. The first group to meet the chunk has them copied.
  Tile copied(const Tile& tile, const Chunk& chunk, int64_t row, int64_t count, bool first) const {
    const int64_t place = is_kept_ ? (&chunk - packing_.chunks().data()) * chunk_bytes_ : 0, at = is_kept_ ? row : 0;
    if (first) products_.copy(tile, count, copies_.data() + at * stride_ + place, stride_);
    return of_copies(tile, copied_at_.data() + at, place);
  }

 private:
  // Of a row, in whole lines. No chunk has more than the first. A line between rows keeps them from being a power of two apart, where they
  // would meet the same few sets of the cache.
  int64_t chunk_bytes() const {
    return packing_.chunks().empty() ? 0 : padded(packing_.lines(packing_.chunks()[0]) * kStepBytes, kLineBytes);
  }
  int64_t kept_rows() const { return std::max(is_kept_ ? rows_ : products_.rows, products_.fewest); }

  // In whole lines of the cache, equally far apart for every tap alike.
  bool lie_evenly() const {
    const auto [taps, steps, is_odd] = packing_.of_row();
    if (is_odd || steps % kLineSteps != 0 || rows_ < products_.fewest) return false;
    const int64_t stride = at_[1] - at_[0];
    if (stride % kLineBytes != 0) return false;
    for (int64_t tap = 0; tap < taps; ++tap) {
      const char* const* const at = at_ + tap * rows_;
      if (uintptr_t(at[0]) % kLineBytes != 0) return false;
      for (int64_t i = 1; i < rows_; ++i) {
        if (at[i] - at[i - 1] != stride) return false;
      }
    }
    return true;
  }

  const Products& products_;
  const Packing& packing_;
  const char* const* const at_;
  const int64_t rows_, chunk_bytes_;
  const bool is_kept_;  // what one group met, for the others
  const bool is_copied_;
  const int64_t stride_;
  const Scratch copies_;
  std::vector<const char*> copied_at_;
};

}  // namespace jaxfuse::contraction
