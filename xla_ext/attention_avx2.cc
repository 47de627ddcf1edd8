#include "attention_loops.h"

const jaxfuse::attention::Kernels jaxfuse::attention::avx2_kernels = kernels;
