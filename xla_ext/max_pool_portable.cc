#include "max_pool_loops.h"

const jaxfuse::max_pool::Kernels jaxfuse::max_pool::portable_kernels = kernels;
