"""A U-Net in Flax nnx: two convolutions with batch norm at every level, pools going down, transposed convolutions going up."""

import functools

import jax.numpy as jnp
from flax import nnx

from . import Network, cross_entropy, image


class DoubleConv(nnx.Module):
    def __init__(self, inputs: int, features: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(inputs, features, kernel_size=(3, 3), padding="SAME", use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(features, rngs=rngs)
        self.conv2 = nnx.Conv(features, features, kernel_size=(3, 3), padding="SAME", use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(features, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(x)))


class UNet(nnx.Module):
    def __init__(self, features, classes: int, *, rngs: nnx.Rngs):
        block = functools.partial(DoubleConv, rngs=rngs)
        *down, bottom = features
        self.encoders = nnx.List([block(inputs, n) for inputs, n in zip([3, *down], down)])
        self.bottom = block(down[-1], bottom)
        self.ups = nnx.List([nnx.ConvTranspose(2 * n, n, kernel_size=(2, 2), strides=(2, 2), rngs=rngs) for n in reversed(down)])
        self.decoders = nnx.List([block(2 * n, n) for n in reversed(down)])
        self.head = nnx.Conv(down[0], classes, kernel_size=(1, 1), rngs=rngs)

    def __call__(self, x):
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = self.bottom(x)
        for up, decoder, skip in zip(self.ups, self.decoders, reversed(skips)):
            x = decoder(jnp.concatenate([skip, up(x)], axis=-1))
        return self.head(x)


def unet(small: bool) -> Network:
    features, classes = ((8, 16, 32), 4) if small else ((64, 128, 256, 512, 1024), 21)

    def build():
        return UNet(features, classes, rngs=nnx.Rngs(0))

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
        """Of one label for all pixels of an image."""
        model = merge(params, state)
        model.train()
        logits = model(x)
        number = cross_entropy(logits.reshape(-1, logits.shape[-1]), jnp.repeat(labels, x.shape[1] * x.shape[2]))
        return number, nnx.to_pure_dict(nnx.split(model, nnx.Param, ...)[2])

    return Network(init, apply, loss, image(2, 32) if small else image(4, 256))
