// How large a tile of contraction_loops.h is, and what is fetched into the cache while it is computed.
#pragma once

#include "contraction_kernels.h"
#include "simd.h"

namespace jaxfuse::contraction {
namespace {

// Of a tile, whose sums fill the registers. More rows and fewer columns would, too: but then not every row's pointer is in a register,
// and rows that lie a power of two apart do not fit together into the first-level cache, which has 8 or 12 lines for them. With AVX2 3 rows
// by 4 vectors are 7 loads for 12 products; a chunk of so wide panels has fewer steps, to fit into the first-level cache.
constexpr int64_t kRows = kLanes == 16 ? 7 : kLanes == 8 ? 3 : 6, kColumns = kLanes == 16 ? 64 : kLanes == 8 ? 32 : 16;
constexpr int64_t kVectors = kColumns / kLanes, kMostSteps = kLanes == 8 ? 128 : 256;

// The lines that are wanted next, a few at a time while a tile is computed.
class Fetch {
 public:
  // `passes`: how often the tile's steps are gone through.
  explicit Fetch(const Tile& tile, int64_t passes = 1)
      : panels_(tile.fetch), layout_(tile.layout), left_(tile.fetched), together_((tile.together + passes - 1) / passes) {}

  void some() {
    for (int64_t i = 0; i < together_ && left_ > 0; ++i, --left_, panels_ += layout_.line) {
#pragma GCC unroll 4
      for (int64_t n = 0; n < kColumns; n += kPanel) __builtin_prefetch(panels_ + n / kPanel * layout_.panel, 0, 2);
    }
  }

 private:
  const char* panels_;
  const Layout layout_;
  int64_t left_;
  const int64_t together_;
};

}  // namespace
}  // namespace jaxfuse::contraction
