#include "dense_loops.h"

const jaxfuse::dense::Kernels jaxfuse::dense::portable_kernels = kernels;
