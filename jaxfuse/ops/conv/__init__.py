"""The convolution: the op, its config, and the kernels that are written in JAX."""

from jaxfuse.ops.conv.call import conv
from jaxfuse.ops.conv.conv import OP

__all__ = ["OP", "conv"]
