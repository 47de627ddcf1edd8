#include "batch_norm_loops.h"

const jaxfuse::batch_norm::Kernels jaxfuse::batch_norm::avx512_kernels = kernels;
