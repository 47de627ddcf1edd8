#include "recurrent_loops.h"

const jaxfuse::recurrent::Kernels jaxfuse::recurrent::portable_kernels = kernels;
