#include "dense_loops.h"

const jaxfuse::dense::Kernels jaxfuse::dense::avx512_kernels = kernels;
