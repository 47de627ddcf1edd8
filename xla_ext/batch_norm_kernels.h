// Batch norm's loops over one tile of a (rows, channels) tensor, as a table of functions for each ISA, and the choice
// among them. batch_norm.cc cuts tensors into tiles and runs them on threads; batch_norm_loops.h is the loops.
#pragma once

#include <cstdint>

#include "activation.h"
#include "element.h"

namespace jaxfuse::batch_norm {

enum class Derivative { none, mask, recompute };

struct Tile {
  int64_t row_begin, row_end, channel_begin, channel_end;
};

// A tile's channel_begin is a multiple of this (whole vectors, whole bytes of mask) ...
constexpr int64_t kChannelStep = 64;
// ... and it has at most this many channels: what a tile's loops hold per channel stays in the L1 cache.
constexpr int64_t kMaxTileChannels = 2048;

// Full-size tensors are f32, bf16 or f16, row-major (rows, channels); per-channel vectors are f32.
struct Affine {
  const float *center, *scale, *offset;
};

struct StatsArgs {
  Element element;
  int64_t channels;
  const void* x;
};

struct ApplyArgs {
  Element element;
  int64_t channels;
  Activation activation;
  Parameters parameters;
  const void* x;
  Affine affine;
  const void* residual;  // or null
  void* y;
  uint8_t* mask;  // or null
  bool stream;    // y past the caches, see streams() in batch_norm_tiles.h
};

struct BackwardArgs {
  Element element;
  int64_t channels;
  Activation activation;
  Parameters parameters;
  Derivative derivative;
  const void *dy, *x;
  const float* mean;
  const uint8_t* mask;   // for Derivative::mask
  Affine affine;         // for Derivative::recompute
  const void* residual;  // for Derivative::recompute, or null
  const float *a, *b, *c;  // from here on for backward_apply only
  void* dx;
  void* dresidual;  // or null
  bool stream;      // dx and dresidual
};

// Per-channel results start at the tile's first channel.
struct Kernels {
  // sum = Σ x, m2 = Σ (x - mean of the tile)²
  void (*stats)(const StatsArgs&, const Tile&, double* sum, double* m2);
  // Adds to the moments of n samples those of another n_other, for `channels` channels.
  void (*merge)(double* sum, double* m2, double n, const double* other_sum, const double* other_m2, double n_other,
                int64_t channels);
  // y = activation((x - center)·scale + offset + residual)
  void (*apply)(const ApplyArgs&, const Tile&);
  // sum_g = Σ g, sum_gx = Σ g·(x - mean), where g = dy·activation'
  void (*backward_stats)(const BackwardArgs&, const Tile&, double* sum_g, double* sum_gx);
  // dx = a·g + b·(x - mean) + c, dresidual = g
  void (*backward_apply)(const BackwardArgs&, const Tile&);
};

extern const Kernels portable_kernels, avx2_kernels, avx512_kernels;

}  // namespace jaxfuse::batch_norm
