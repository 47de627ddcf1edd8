#include "conv_depthwise_loops.h"

const jaxfuse::conv::depthwise::Kernels jaxfuse::conv::depthwise::portable_kernels = kernels;
