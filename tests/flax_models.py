"""A Flax model with layers that are shared or the user's own, and how numbers of exchanged layers are compared."""

import jax
import numpy as np
from flax import nnx

from compare import same
from flax_grid import BF16

X = jax.random.normal(jax.random.key(0), (4, 16, 16, 3))


class Own(nnx.BatchNorm):
    """A user's own variant of a layer."""


class Net(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.Conv(16, 16, (3, 3), use_bias=False, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)])
        self.own = Own(16, rngs=rngs)
        self.again = self.layers[0]  # shared
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        y = self.layers[1](self.layers[0](x))
        x = nnx.relu(y + x)
        x = nnx.relu(self.own(self.again(x)))
        return self.head(self.dropout(x.mean((1, 2))))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(mine, theirs, name=""):
    """Within roundings of the size of each array, or, where what is summed to it cancels, of the largest.

    Where a bfloat16 sum is rounded once or three times, single elements cross an activation's kink: the bias gradient of
    "transpose bf16" is 4.7 % from float32's, Flax's own 5.4 %, and they are 4.9 % apart.
    """
    if name in BF16 or "bf16" in name:
        same(mine, theirs, narrowest="bfloat16", times=15)
    else:
        same(mine, theirs, times=15, floor=0.01)
