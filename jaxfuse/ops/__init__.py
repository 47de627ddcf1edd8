"""The fused primitives, usable without `fuse`."""

from jaxfuse.ops.attention import attention
from jaxfuse.ops.batch_norm import batch_norm
from jaxfuse.ops.conv.call import conv
from jaxfuse.ops.dense import dense
from jaxfuse.ops.errors import OpError
from jaxfuse.ops.global_average_pool import global_average_pool
from jaxfuse.ops.gru import gru
from jaxfuse.ops.lstm import lstm
from jaxfuse.ops.max_pool import max_pool
from jaxfuse.ops.norm_call import group_norm, layer_norm, rms_norm

__all__ = [
    "OpError", "attention", "batch_norm", "conv", "dense", "global_average_pool", "group_norm", "gru", "layer_norm", "lstm", "max_pool",
    "rms_norm"]
