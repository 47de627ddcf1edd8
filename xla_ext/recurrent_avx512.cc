#include "recurrent_loops.h"

const jaxfuse::recurrent::Kernels jaxfuse::recurrent::avx512_kernels = kernels;
