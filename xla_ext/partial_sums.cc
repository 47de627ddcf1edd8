#include "partial_sums.h"

#include <algorithm>

#include "cut.h"
#include "parallel.h"

namespace jaxfuse {

void add_parts(const float* partial, int64_t count, int64_t width, float* totals) {
  constexpr int64_t kTaskElements = 1 << 14, kFewest = 16, kMost = 256;  // columns of a task
  const int64_t step = std::clamp(kTaskElements / std::max<int64_t>(count, 1), kFewest, kMost);
  parallel_for(parts(width, step), [&](int64_t task) {
    const int64_t begin = task * step, columns = std::min(step, width - begin);
    double sums[kMost] = {};
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t c = 0; c < columns; ++c) sums[c] += partial[i * width + begin + c];
    }
    for (int64_t c = 0; c < columns; ++c) totals[begin + c] = float(sums[c]);
  });
}

}  // namespace jaxfuse
