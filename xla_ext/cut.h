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

}  // namespace jaxfuse
