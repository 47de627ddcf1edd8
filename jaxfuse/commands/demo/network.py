"""The demo's networks as a Flax user writes them: nothing here knows of jaxfuse."""

from functools import partial

import jax
import numpy as np
from flax import linen as nn


class Residual(nn.Module):
    """Two 3×3 convolutions and the input added to them, projected by a 1×1 where the shapes differ."""

    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, self.features, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.8)
        y = conv((3, 3), self.strides)(x)
        y = norm()(y)
        y = nn.relu(y)
        y = conv((3, 3))(y)
        y = norm()(y)
        if x.shape != y.shape:
            x = conv((1, 1), self.strides, name="conv_proj")(x)
            x = norm(name="norm_proj")(x)
        return nn.relu(x + y)


class Separable(nn.Module):
    """A depthwise 3×3 and a 1×1 convolution, as in MobileNet."""

    features: int

    @nn.compact
    def __call__(self, x, train):
        channels = x.shape[-1]
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.8)
        x = nn.Conv(channels, (3, 3), feature_group_count=channels, use_bias=False)(x)
        x = norm()(x)
        x = nn.relu6(x)
        x = nn.Conv(self.features, (1, 1), use_bias=False)(x)
        x = norm()(x)
        return nn.relu6(x)


class DigitNet(nn.Module):
    """Images [batch, height, width, 1] to the logits of ten digits [batch, 10]."""

    features: int = 16

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(self.features, (3, 3))(x)
        x = nn.relu(x)
        x = Residual(self.features)(x, train)
        x = Residual(2 * self.features, strides=2)(x, train)
        x = Separable(2 * self.features)(x, train)
        x = Residual(4 * self.features, strides=2)(x, train)
        x = x.mean(axis=(1, 2))
        return nn.Dense(10)(x)


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 and the input added to them."""

    features: int
    strides: int

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), self.strides)(y)))
        y = norm()(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = conv(4 * self.features, (1, 1), self.strides, name="conv_proj")(x)
            x = norm(name="norm_proj")(x)
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """Images [batch, 224, 224, 3] to logits [batch, 1000]."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(64, (7, 7), 2, padding=3, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x)
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Bottleneck(64 * 2**stage, 2 if stage > 0 and block == 0 else 1)(x, train)
        x = x.mean(axis=(1, 2))
        return nn.Dense(1000)(x)


def random_variables(model, images, spread=0.0):
    """{"params", "batch_stats"} of float32 arrays, the same in every run; `images` gives shape and dtype only.

    Kernels are normal with variance 1/fan-in, as Flax draws them; scales and variances lie in 1 ± spread, biases and means in
    0 ± spread. Drawn by numpy: compiling Flax's initialisers takes longer than the quick demo trains.
    """
    random = np.random.default_rng(0)

    def draw(path, leaf):
        name = path[-1].key
        if name == "kernel":
            return random.standard_normal(leaf.shape, np.float32) * np.float32(np.prod(leaf.shape[:-1]) ** -0.5)
        center = 1 if name in ("scale", "var") else 0
        return random.uniform(center - spread, center + spread, leaf.shape).astype(np.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    return jax.tree_util.tree_map_with_path(draw, shapes)
