#include "dense_loops.h"

const jaxfuse::dense::Kernels jaxfuse::dense::avx2_kernels = kernels;
