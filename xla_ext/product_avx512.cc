#include "product_loops.h"

const jaxfuse::product::Kernels jaxfuse::product::avx512_kernels = kernels;
