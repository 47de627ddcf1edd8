// How rows are dealt to blocks and threads, and how the moments of two sets of rows are put together.
#pragma once

#include "device.cuh"

namespace jaxfuse::cuda {

// Chunks of rows go to the parts in turn, so that all parts read neighbouring memory at a time, and end together at the end
// of the tensor. Within a chunk the rows go to the lanes in turn. chunk is a multiple of every number of lanes.
struct Deal {
  int64_t rows;
  int32_t parts, chunk;

  HOST_DEVICE int64_t chunks() const { return (rows + chunk - 1) / chunk; }

  // How many rows lane `lane` of `lanes` has of part `part`.
  HOST_DEVICE int64_t count(int32_t part, int32_t lane, int32_t lanes) const {
    const int64_t all = chunks(), mine = all / parts + (part < all % parts), last = rows - (all - 1) * chunk;
    if (mine == 0) return 0;
    if (part != (all - 1) % parts) return mine * (chunk / lanes);
    return (mine - 1) * (chunk / lanes) + (last > lane ? (last - lane + lanes - 1) / lanes : 0);
  }
};

// The mean of n numbers and Σ (number - mean)². Chan, Golub and LeVeque: together they have m2 + m2' + (mean' - mean)²·n·n'/(n + n').
// The means are weighed, not moved: an Inf among them stays one.
struct Moments {
  float mean, m2;

  HOST_DEVICE void add(float n, const Moments& other, float other_n) {
    if (other_n == 0) return;
    const float weight = other_n / (n + other_n), gap = other.mean - mean;
    m2 += other.m2 + gap * gap * (n * weight);
    mean = n == 0 ? other.mean : mean * (1.0f - weight) + other.mean * weight;
  }
};

}  // namespace jaxfuse::cuda
