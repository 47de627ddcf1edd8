#include "conv_winograd_loops.h"

const jaxfuse::conv::winograd::Kernels jaxfuse::conv::winograd::portable_kernels = kernels;
