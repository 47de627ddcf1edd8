#include "batch_norm_loops.h"

const jaxfuse::batch_norm::Kernels jaxfuse::batch_norm::portable_kernels = kernels;
