"""Flax linen's layers, fused, and blocks of them: `import jaxfuse.flax.linen as fnn`, then `fnn.Conv` for `nn.Conv`."""

from jaxfuse.flax.linen.blocks import MLP, Bottleneck, ConvNeXt, ConvNorm, InvertedResidual, Residual
from jaxfuse.flax.linen.layers import (
    RNN, BatchNorm, Conv, ConvTranspose, Dense, GroupNorm, GRUCell, LayerNorm, LSTMCell, OptimizedLSTMCell, RMSNorm, fused)
from jaxfuse.flax.linen.replace import exchanged, replace

__all__ = [
    "BatchNorm", "Bottleneck", "Conv", "ConvNeXt", "ConvNorm", "ConvTranspose", "Dense", "GRUCell", "GroupNorm",
    "InvertedResidual", "LSTMCell", "LayerNorm", "MLP", "OptimizedLSTMCell", "RMSNorm", "RNN", "Residual", "exchanged",
    "fused", "replace"]
