#include "norm_loops.h"

const jaxfuse::norm::Kernels jaxfuse::norm::avx2_kernels = kernels;
