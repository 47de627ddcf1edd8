#include "conv_depthwise_loops.h"

const jaxfuse::conv::depthwise::Kernels jaxfuse::conv::depthwise::avx512_kernels = kernels;
