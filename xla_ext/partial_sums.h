// Sums that tasks left in parts, put together.
#pragma once

#include <cstdint>

namespace jaxfuse {

// totals[c] = Σ partial[i·width + c] over i < count, c < width: in double, part after part. So the bits do not depend on who does it, and
// a few columns are a task. `totals` may be the first part.
void add_parts(const float* partial, int64_t count, int64_t width, float* totals);

}  // namespace jaxfuse
