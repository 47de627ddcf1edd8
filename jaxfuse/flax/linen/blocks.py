"""Blocks of convolutional networks and transformers, in Flax linen, each fused as one program.

`train` chooses between the batch's statistics, which update the running ones in `batch_stats`, and the running ones.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxfuse.flax.linen.layers import BatchNorm, Conv, Dense, LayerNorm, fused

Activation = Callable[[jax.Array], jax.Array]


class ConvNorm(nn.Module):
    """activation(batch_norm(conv(x)) + residual), for x `[batch, *spatial, channels]`; the convolution has no bias.

    `kernel_size`, `strides`, `padding` and `groups` (feature_group_count) are `flax.linen.Conv`'s; `momentum` and `epsilon`
    `flax.linen.BatchNorm`'s.
    """

    features: int
    kernel_size: Sequence[int] = (3, 3)
    strides: int | Sequence[int] = 1
    padding: str | int | Sequence[tuple[int, int]] = "SAME"
    groups: int = 1
    activation: Activation | None = nn.relu
    momentum: float = 0.9
    epsilon: float = 1e-5
    dtype: jnp.dtype | None = None

    @fused
    @nn.compact
    def __call__(self, x, *, train: bool, residual=None):
        y = Conv(self.features, self.kernel_size, self.strides, self.padding, feature_group_count=self.groups,
                 use_bias=False, dtype=self.dtype)(x)
        norm = BatchNorm(not train, momentum=self.momentum, epsilon=self.epsilon, dtype=self.dtype, activation=self.activation)
        return norm(y, residual=residual)


class Residual(nn.Module):
    """The basic block of ResNet (He et al. 2016, figure 2): two 3×3 convolutions, and x added, projected if shapes differ."""

    features: int
    strides: int = 1
    activation: Activation = nn.relu
    dtype: jnp.dtype | None = None

    @fused
    @nn.compact
    def __call__(self, x, *, train: bool):
        y = ConvNorm(self.features, (3, 3), self.strides, activation=self.activation, dtype=self.dtype)(x, train=train)
        x = _projected(self, x, self.features, train)
        return ConvNorm(self.features, (3, 3), activation=self.activation, dtype=self.dtype)(y, train=train, residual=x)


class Bottleneck(nn.Module):
    """The deeper block of ResNet (He et al. 2016, figure 5): 1×1, 3×3, 1×1 to `expansion · features` channels, and x added."""

    features: int
    strides: int = 1
    expansion: int = 4
    groups: int = 1
    activation: Activation = nn.relu
    dtype: jnp.dtype | None = None

    @fused
    @nn.compact
    def __call__(self, x, *, train: bool):
        act, dtype, wide = self.activation, self.dtype, self.expansion * self.features
        y = ConvNorm(self.features, (1, 1), activation=act, dtype=dtype)(x, train=train)
        y = ConvNorm(self.features, (3, 3), self.strides, groups=self.groups, activation=act, dtype=dtype)(y, train=train)
        x = _projected(self, x, wide, train)
        return ConvNorm(wide, (1, 1), activation=act, dtype=dtype)(y, train=train, residual=x)


def _projected(block, x, features: int, train: bool):
    """x in the shape of the block's result."""
    if block.strides == 1 and x.shape[-1] == features:
        return x
    return ConvNorm(features, (1, 1), block.strides, activation=None, dtype=block.dtype, name="projection")(x, train=train)


class InvertedResidual(nn.Module):
    """MobileNetV2's block (Sandler et al. 2018, table 1): 1×1 up, depthwise 3×3, 1×1 down without activation, and x added."""

    features: int
    strides: int = 1
    expansion: int = 6
    activation: Activation = nn.relu6
    dtype: jnp.dtype | None = None

    @fused
    @nn.compact
    def __call__(self, x, *, train: bool):
        act, dtype, wide = self.activation, self.dtype, self.expansion * x.shape[-1]
        y = x if self.expansion == 1 else ConvNorm(wide, (1, 1), activation=act, dtype=dtype)(x, train=train)
        y = ConvNorm(wide, (3, 3), self.strides, groups=wide, activation=act, dtype=dtype)(y, train=train)
        shortcut = x if self.strides == 1 and x.shape[-1] == self.features else None
        return ConvNorm(self.features, (1, 1), activation=None, dtype=dtype)(y, train=train, residual=shortcut)


class MLP(nn.Module):
    """dense(activation(dense(x))) + residual, for x `[..., features]`; `hidden` features between."""

    hidden: int
    activation: Activation = nn.gelu
    dtype: jnp.dtype | None = None

    @fused
    @nn.compact
    def __call__(self, x, *, residual=None):
        y = Dense(self.hidden, dtype=self.dtype, activation=self.activation)(x)
        return Dense(x.shape[-1], dtype=self.dtype)(y, residual=residual)


class ConvNeXt(nn.Module):
    """ConvNeXt's block (Liu et al. 2022, figure 4): depthwise 7×7, layer norm, an MLP, a scale per channel, and x added."""

    expansion: int = 4
    layer_scale: float = 1e-6
    dtype: jnp.dtype | None = None

    @fused
    @nn.compact
    def __call__(self, x):
        channels = x.shape[-1]
        y = Conv(channels, (7, 7), feature_group_count=channels, dtype=self.dtype)(x)
        y = LayerNorm(dtype=self.dtype)(y)
        y = MLP(self.expansion * channels, dtype=self.dtype)(y)
        scale = self.param("scale", nn.initializers.constant(self.layer_scale), (channels,))
        return x + (y * scale).astype(x.dtype)
