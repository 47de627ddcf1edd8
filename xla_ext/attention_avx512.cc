#include "attention_loops.h"

const jaxfuse::attention::Kernels jaxfuse::attention::avx512_kernels = kernels;
