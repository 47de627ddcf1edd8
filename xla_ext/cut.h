// How an extent is cut into parts.
#pragma once

#include <cstdint>

namespace jaxfuse {

// Parts of `size` that an extent has, the last one perhaps smaller.
inline int64_t parts(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

// The extent, filled up to whole units.
inline int64_t padded(int64_t extent, int64_t unit) { return parts(extent, unit) * unit; }

// The size of as few even parts as have `most` elements each.
inline int64_t even(int64_t extent, int64_t most) { return parts(extent, parts(extent, most)); }

namespace {  // for loops too, each for its own ISA

// An extent in `count` parts one after the other, as even as can be, by one division for all of them.
class Shares {
 public:
  Shares(int64_t extent, int64_t count) : least_(count ? extent / count : 0), larger_(count ? extent % count : 0) {}

  int64_t most() const { return least_ + (larger_ > 0); }
  int64_t next() { return least_ + (larger_-- > 0); }

 private:
  const int64_t least_;
  int64_t larger_;  // parts that have one more
};

}  // namespace

}  // namespace jaxfuse
