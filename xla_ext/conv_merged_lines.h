// Of few channels the taps of a line are taken as one, whose channels are those of all of them: they lie side by side in x, where
// it has its padding. [.., taps, channels, features] is [.., 1, taps·channels, features].
#pragma once

#include "conv.h"

namespace jaxfuse::conv::contracted {

// As _merges_lines in jaxfuse/ops/conv/packed.py.
bool merges_lines(const Geometry& geometry, const Tensor& w);

// The filter so, if it can be.
Tensor with_merged_lines(const Geometry& geometry, Tensor w);

// x with zeros, bytes as they are in x, before and behind each of its lines.
Tensor padded_lines(const Tensor& x, int64_t low, int64_t high, char zero, char* to);

}  // namespace jaxfuse::conv::contracted
