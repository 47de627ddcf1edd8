// Sums over rows are made in parts, each by one block, in memory that the caller gives; here the parts are put together.
#pragma once

#include <cuda_runtime.h>

#include "deal.cuh"

namespace jaxfuse::cuda {

struct ColumnSums {
  const float* partials;  // (parts, 2, channels)
  int32_t parts;
  int64_t channels;
  float *first, *second;  // (channels)
};

// first = Σ of the parts' first numbers, second = Σ of their second.
void finish_sums(const ColumnSums&, cudaStream_t);

// The parts are mean and Σ (x - mean)² of the rows that `deal` gives them; first = mean, second = variance of all.
void finish_moments(const ColumnSums&, const Deal&, cudaStream_t);

}  // namespace jaxfuse::cuda
