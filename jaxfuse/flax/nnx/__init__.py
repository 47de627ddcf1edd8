"""Flax nnx's layers, fused, and blocks of them: `import jaxfuse.flax.nnx as fnnx`, then `fnnx.Conv` for `nnx.Conv`."""

from jaxfuse.flax.nnx.blocks import MLP, Bottleneck, ConvNeXt, ConvNorm, InvertedResidual, Residual
from jaxfuse.flax.nnx.layers import (
    RNN, BatchNorm, Conv, ConvTranspose, GroupNorm, GRUCell, LayerNorm, Linear, LSTMCell, OptimizedLSTMCell, RMSNorm, fused)
from jaxfuse.flax.nnx.replace import exchanged, explain, replace

__all__ = [
    "BatchNorm", "Bottleneck", "Conv", "ConvNeXt", "ConvNorm", "ConvTranspose", "GRUCell", "GroupNorm",
    "InvertedResidual", "LSTMCell", "LayerNorm", "Linear", "MLP", "OptimizedLSTMCell", "RMSNorm", "RNN", "Residual",
    "exchanged", "explain", "fused", "replace"]
