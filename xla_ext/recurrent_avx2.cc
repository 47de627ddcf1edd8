#include "recurrent_loops.h"

const jaxfuse::recurrent::Kernels jaxfuse::recurrent::avx2_kernels = kernels;
