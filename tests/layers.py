"""Arrays and layers as anybody writes them, which many tests take their programs from."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from arrays import array


def randn(*shape, seed=0, dtype=jnp.float32):
    return array(np.random.default_rng((seed, *shape)).normal(size=shape), dtype)


def conv(x, w, **kwargs):
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) | kwargs
    return lax.conv_general_dilated(x, w, **options)


# of a convolution: the image, the filter, the bias, a residual; of a frozen batch norm; of a batch norm: the image, a residual
X, W, B, R = randn(2, 8, 8, 4), 0.2 * randn(3, 3, 4, 8), randn(8, seed=1), randn(2, 8, 8, 8, seed=2)
GAMMA, BETA, MEAN, VAR = randn(8, seed=3), randn(8, seed=4), randn(8, seed=5), jnp.abs(randn(8, seed=6))
Z, ZR = 3 + 2 * randn(4, 6, 6, 8), randn(4, 6, 6, 8, seed=7)


def fast_moments(x, axes=(0, 1, 2)):
    mean = x.mean(axes)
    return mean, jnp.maximum(0, (x * x).mean(axes) - mean * mean)


def slow_moments(x, axes=(0, 1, 2)):
    return x.mean(axes), x.var(axes)


def batch_norm(x, gamma, beta):
    mean, var = slow_moments(x)
    return (x - mean) * lax.rsqrt(var + 1e-5) * gamma + beta


class Bottleneck(nn.Module):
    features: int
    strides: int = 1
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, train):
        def norm(name):
            return nn.BatchNorm(use_running_average=not train, dtype=self.dtype, name=name)

        y = nn.Conv(self.features, (1, 1), use_bias=False, dtype=self.dtype)(x)
        y = nn.relu(norm("norm1")(y))
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False, dtype=self.dtype)(y)
        y = nn.relu(norm("norm2")(y))
        y = norm("norm3")(nn.Conv(4 * self.features, (1, 1), use_bias=False, dtype=self.dtype)(y))
        if x.shape != y.shape:
            x = nn.Conv(4 * self.features, (1, 1), self.strides, use_bias=False, dtype=self.dtype)(x)
            x = norm("norm4")(x)
        return nn.relu(x + y)


class SmallNet(nn.Module):
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(8, (3, 3), dtype=self.dtype)(x))
        x = Bottleneck(4, 2, self.dtype)(x, train)
        x = Bottleneck(4, 1, self.dtype)(x, train)
        x = nn.relu6(nn.Conv(16, (3, 3), feature_group_count=16, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x, scale=1.0):
        x = nn.Conv(256, (3, 3), use_bias=False)(x)
        return nn.BatchNorm(use_running_average=True)(x) * scale


def variables_of(model, x):
    """Random, every one of them: statistics and scales too."""
    flat, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(1), x))
    random = np.random.default_rng(0)

    def drawn(like):
        signs = random.choice([-1, 1], like.shape[-1:] if like.ndim > 1 else ())
        return array(random.uniform(0.5, 1.5, like.shape) * signs, like.dtype)

    return jax.tree.unflatten(tree, list(map(drawn, flat)))
