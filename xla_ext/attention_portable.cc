#include "attention_loops.h"

const jaxfuse::attention::Kernels jaxfuse::attention::portable_kernels = kernels;
