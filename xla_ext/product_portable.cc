#include "product_loops.h"

const jaxfuse::product::Kernels jaxfuse::product::portable_kernels = kernels;
