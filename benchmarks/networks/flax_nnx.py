"""ResNet-50 in the style of Flax's nnx examples."""

import functools

import jax.numpy as jnp
from flax import nnx

from . import Network, cross_entropy, image


class Bottleneck(nnx.Module):
    def __init__(self, inputs: int, filters: int, strides: int, *, rngs: nnx.Rngs):
        conv, norm = functools.partial(nnx.Conv, use_bias=False, rngs=rngs), functools.partial(nnx.BatchNorm, rngs=rngs)
        self.conv1, self.bn1 = conv(inputs, filters, (1, 1)), norm(filters)
        self.conv2, self.bn2 = conv(filters, filters, (3, 3), strides=strides), norm(filters)
        self.conv3, self.bn3 = conv(filters, 4 * filters, (1, 1)), norm(4 * filters)
        projects = strides != 1 or inputs != 4 * filters
        projection = nnx.Sequential(conv(inputs, 4 * filters, (1, 1), strides=strides), norm(4 * filters)) if projects else None
        self.projection = nnx.data(projection)

    def __call__(self, x):
        residual = x if self.projection is None else self.projection(x)
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return nnx.relu(x + residual)


class ResNet(nnx.Module):
    def __init__(self, stage_sizes, filters: int, classes: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, filters, (7, 7), strides=2, use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(filters, rngs=rngs)
        blocks, inputs = [], filters
        for i, size in enumerate(stage_sizes):
            for j in range(size):
                blocks.append(Bottleneck(inputs, filters * 2**i, 2 if i > 0 and j == 0 else 1, rngs=rngs))
                inputs = 4 * filters * 2**i
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.bn(self.conv(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def resnet50(small: bool, exchange=lambda model: model) -> Network:
    sizes = ((1, 1), 8, 10) if small else ((3, 4, 6, 3), 64, 1000)

    def build():
        return exchange(ResNet(*sizes, rngs=nnx.Rngs(0)))

    graphdef, _, _ = nnx.split(nnx.eval_shape(build), nnx.Param, ...)

    def init():
        _, params, state = nnx.split(build(), nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    def merge(params, state):
        _, *states = nnx.split(nnx.eval_shape(build), nnx.Param, ...)
        for given, pure in zip(states, (params, state)):
            nnx.replace_by_pure_dict(given, pure)
        return nnx.merge(graphdef, *states)

    def apply(params, state, x):
        model = merge(params, state)
        model.eval()
        return model(x)

    def loss(params, state, x, labels):
        model = merge(params, state)
        model.train()
        number = cross_entropy(model(x), labels)
        return number, nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[2])

    return Network(init, apply, loss, image(4, 32) if small else image(8, 224))
