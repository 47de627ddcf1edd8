"""Blocks of convolutional networks and transformers, in Flax nnx, each fused as one program.

`model.train()` and `model.eval()` choose between the batch's statistics, which update the running ones, and the running ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfuse.flax.nnx.layers import BatchNorm, Conv, LayerNorm, Linear, fused

Activation = Callable[[jax.Array], jax.Array]


class ConvNorm(nnx.Module):
    """activation(batch_norm(conv(x)) + residual), for x `[batch, *spatial, in_features]`; the convolution has no bias.

    `kernel_size`, `strides`, `padding` and `groups` (feature_group_count) are `flax.nnx.Conv`'s; `momentum` and `epsilon`
    `flax.nnx.BatchNorm`'s.
    """

    def __init__(self, in_features: int, out_features: int, kernel_size: Sequence[int] = (3, 3),
                 strides: int | Sequence[int] = 1, *, padding: str | int | Sequence[tuple[int, int]] = "SAME",
                 groups: int = 1, activation: Activation | None = nnx.relu, momentum: float = 0.9, epsilon: float = 1e-5,
                 dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        self.conv = Conv(in_features, out_features, kernel_size, strides, padding=padding, feature_group_count=groups,
                         use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = BatchNorm(out_features, momentum=momentum, epsilon=epsilon, dtype=dtype, activation=activation, rngs=rngs)

    @fused
    def __call__(self, x, *, residual=None):
        return self.norm(self.conv(x), residual=residual)


class Residual(nnx.Module):
    """The basic block of ResNet (He et al. 2016, figure 2): two 3×3 convolutions, and x added, projected if shapes differ."""

    def __init__(self, in_features: int, features: int, strides: int = 1, *, activation: Activation = nnx.relu,
                 dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        self.first = ConvNorm(in_features, features, (3, 3), strides, activation=activation, **options)
        self.last = ConvNorm(features, features, (3, 3), activation=activation, **options)
        self.projection = _projection(in_features, features, strides, options)

    @fused
    def __call__(self, x):
        return self.last(self.first(x), residual=x if self.projection is None else self.projection(x))


class Bottleneck(nnx.Module):
    """The deeper block of ResNet (He et al. 2016, figure 5): 1×1, 3×3, 1×1 to `expansion · features` channels, and x added."""

    def __init__(self, in_features: int, features: int, strides: int = 1, *, expansion: int = 4, groups: int = 1,
                 activation: Activation = nnx.relu, dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        wide = expansion * features
        self.first = ConvNorm(in_features, features, (1, 1), activation=activation, **options)
        self.middle = ConvNorm(features, features, (3, 3), strides, groups=groups, activation=activation, **options)
        self.last = ConvNorm(features, wide, (1, 1), activation=activation, **options)
        self.projection = _projection(in_features, wide, strides, options)

    @fused
    def __call__(self, x):
        return self.last(self.middle(self.first(x)), residual=x if self.projection is None else self.projection(x))


def _projection(in_features: int, features: int, strides: int, options: dict) -> ConvNorm | None:
    """Brings x to the shape of the block's result; None if it has it."""
    if strides == 1 and in_features == features:
        return None
    return ConvNorm(in_features, features, (1, 1), strides, activation=None, **options)


class InvertedResidual(nnx.Module):
    """MobileNetV2's block (Sandler et al. 2018, table 1): 1×1 up, depthwise 3×3, 1×1 down without activation, and x added."""

    def __init__(self, in_features: int, features: int, strides: int = 1, *, expansion: int = 6,
                 activation: Activation = nnx.relu6, dtype: jnp.dtype | None = None, rngs: nnx.Rngs):
        options: dict[str, Any] = dict(dtype=dtype, rngs=rngs)
        wide = expansion * in_features
        self.first = None if expansion == 1 else ConvNorm(in_features, wide, (1, 1), activation=activation, **options)
        self.middle = ConvNorm(wide, wide, (3, 3), strides, groups=wide, activation=activation, **options)
        self.last = ConvNorm(wide, features, (1, 1), activation=None, **options)
        self.has_shortcut = strides == 1 and in_features == features

    @fused
    def __call__(self, x):
        y = self.middle(x if self.first is None else self.first(x))
        return self.last(y, residual=x if self.has_shortcut else None)


class MLP(nnx.Module):
    """linear(activation(linear(x))) + residual, for x `[..., features]`; `hidden` features between."""

    def __init__(self, features: int, hidden: int, *, activation: Activation = nnx.gelu, dtype: jnp.dtype | None = None,
                 rngs: nnx.Rngs):
        self.up = Linear(features, hidden, activation=activation, dtype=dtype, rngs=rngs)
        self.down = Linear(hidden, features, dtype=dtype, rngs=rngs)

    @fused
    def __call__(self, x, *, residual=None):
        return self.down(self.up(x), residual=residual)


class ConvNeXt(nnx.Module):
    """ConvNeXt's block (Liu et al. 2022, figure 4): depthwise 7×7, layer norm, an MLP, a scale per channel, and x added."""

    def __init__(self, features: int, *, expansion: int = 4, layer_scale: float = 1e-6, dtype: jnp.dtype | None = None,
                 rngs: nnx.Rngs):
        self.conv = Conv(features, features, (7, 7), feature_group_count=features, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(features, dtype=dtype, rngs=rngs)
        self.mlp = MLP(features, expansion * features, dtype=dtype, rngs=rngs)
        self.scale = nnx.Param(jnp.full((features,), layer_scale))

    @fused
    def __call__(self, x):
        y = self.mlp(self.norm(self.conv(x)))
        return x + (y * self.scale[...]).astype(x.dtype)
