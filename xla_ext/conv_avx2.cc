#include "conv_loops.h"

const jaxfuse::conv::Kernels jaxfuse::conv::avx2_kernels = kernels;
