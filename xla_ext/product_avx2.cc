#include "product_loops.h"

const jaxfuse::product::Kernels jaxfuse::product::avx2_kernels = kernels;
