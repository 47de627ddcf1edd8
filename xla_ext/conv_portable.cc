#include "conv_loops.h"

const jaxfuse::conv::Kernels jaxfuse::conv::portable_kernels = kernels;
