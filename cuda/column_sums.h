// Sums over rows are made in parts, each by one block, in memory that the caller gives; here the parts are put together.
#pragma once

#include <cuda_runtime.h>

#include "deal.cuh"

namespace jaxfuse::cuda {

struct ColumnSums {
  const float* partials;  // (parts, of_first + of_second)
  int32_t parts;
  int64_t of_first, of_second;  // columns
  float *first, *second;        // (of_first), (of_second): the sums of the columns
};

void finish_sums(const ColumnSums&, cudaStream_t);

// The parts are mean and Σ (x - mean)² of the rows that `deal` gives them; first = mean, second = variance of all. Both are of as
// many columns.
void finish_moments(const ColumnSums&, const Deal&, cudaStream_t);

}  // namespace jaxfuse::cuda
