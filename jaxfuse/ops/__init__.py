"""The fused primitives, usable without `fuse`."""

from jaxfuse.ops.batch_norm import batch_norm
from jaxfuse.ops.conv import conv
from jaxfuse.ops.errors import OpError
from jaxfuse.ops.gru import gru
from jaxfuse.ops.lstm import lstm
from jaxfuse.ops.max_pool import max_pool

__all__ = ["OpError", "batch_norm", "conv", "gru", "lstm", "max_pool"]
