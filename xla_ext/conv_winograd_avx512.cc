#include "conv_winograd_loops.h"

const jaxfuse::conv::winograd::Kernels jaxfuse::conv::winograd::avx512_kernels = kernels;
