#include "norm_loops.h"

const jaxfuse::norm::Kernels jaxfuse::norm::avx512_kernels = kernels;
