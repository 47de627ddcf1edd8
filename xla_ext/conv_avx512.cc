#include "conv_loops.h"

const jaxfuse::conv::Kernels jaxfuse::conv::avx512_kernels = kernels;
