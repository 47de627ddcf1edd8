#include "conv_winograd_loops.h"

const jaxfuse::conv::winograd::Kernels jaxfuse::conv::winograd::avx2_kernels = kernels;
