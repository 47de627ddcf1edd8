"""ResNet-50 in the style of Flax's ImageNet example (linen)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from . import Network, cross_entropy, image


class Bottleneck(nn.Module):
    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = self.conv(self.filters, (1, 1))(x)
        y = self.norm()(y)
        y = nn.relu(y)
        y = self.conv(self.filters, (3, 3), self.strides)(y)
        y = self.norm()(y)
        y = nn.relu(y)
        y = self.conv(self.filters * 4, (1, 1))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters * 4, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    num_filters: int = 64
    num_classes: int = 1000
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype)
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = norm(name="bn_init")(x)
        x = nn.relu(x)
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, block_size in enumerate(self.stage_sizes):
            for j in range(block_size):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = Bottleneck(self.num_filters * 2**i, strides=strides, conv=conv, norm=norm)(x)
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dense(self.num_classes, dtype=self.dtype)(x)
        return jnp.asarray(x, self.dtype)


def resnet50(small: bool, dtype: str, exchange=lambda model: model) -> Network:
    model = exchange(ResNet((1, 1), 8, 10, dtype=dtype) if small else ResNet(dtype=dtype))
    x = image(4, 32) if small else image(8, 224)

    def init():
        variables = model.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype), train=False)
        return variables["params"], variables["batch_stats"]

    def apply(params, state, x):
        return model.apply({"params": params, "batch_stats": state}, x, train=False)

    def loss(params, state, x, labels):
        logits, updates = model.apply({"params": params, "batch_stats": state}, x, mutable=["batch_stats"])
        return cross_entropy(logits, labels), updates["batch_stats"]

    return Network(init, apply, loss, x)
