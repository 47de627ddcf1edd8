#include "norm_loops.h"

const jaxfuse::norm::Kernels jaxfuse::norm::portable_kernels = kernels;
