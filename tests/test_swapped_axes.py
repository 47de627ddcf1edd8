"""A layer's value that is transposed or reshaped before it is read, where shapes may tell nothing: batch and width are equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compare import jit, same
from recognition import fuse

pytestmark = pytest.mark.usefixtures("some_kernel")
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)) / 2, jnp.float32)
B = jnp.asarray(np.random.default_rng(2).normal(size=4), jnp.float32)
NARROW, SQUARE = (jnp.asarray(np.random.default_rng(0).normal(size=(2, n, 4)) + 0.3, jnp.float32)[:n] for n in (7, 2))


def normalised(x, axes):
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(axes, keepdims=True) + 1e-3)


LAYERS = {
    "dense": lambda x, b: x @ W + b,
    "conv": lambda x, b: lax.conv_general_dilated(x, W[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) + b,
    "instance norm": lambda x, b: normalised(x, 1) + b,
    "layer norm": lambda x, b: normalised(x, 2) * b,
    "batch norm": lambda x, b: normalised(x, (0, 1)) * b + b,
}


def over_time(y):
    return lax.scan(lambda h, x: (jnp.tanh(x @ W + h),) * 2, jnp.zeros((y.shape[0], 4)), y.swapaxes(0, 1))[1].swapaxes(0, 1)


READERS = {
    "swapped": lambda y: y.swapaxes(0, 1),
    "swapped, to a layer of the same weight": lambda y: y.swapaxes(0, 1) @ W,
    "swapped and flattened": lambda y: y.swapaxes(0, 1).reshape(-1, 4),
    "swapped and added to": lambda y: y.swapaxes(0, 1) + jnp.cos(jnp.arange(4.0)),
    "over time": over_time,
    "channels first": lambda y: y.swapaxes(1, 2),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("layer", LAYERS)
def test_value_and_gradients(layer, reader):
    """In a whole step, through the loss, and in forward mode; with an activation that its value tells, and one that it does not."""

    def loss(act, x, b):
        y = READERS[reader](act(LAYERS[layer](x, b)))
        return (y * jnp.sin(jnp.arange(y.size)).reshape(y.shape)).sum()

    def of_all(f):
        losses = [f(lambda x, b, act=act: loss(act, x, b)) for act in (jax.nn.relu, jax.nn.silu)]
        return lambda: [one(x, B) for one in losses for x in (NARROW, SQUARE)]

    def step(f):
        return jax.value_and_grad(f, (0, 1))

    def pushed(f):
        return lambda x, b: jax.jvp(f, (x, b), (x, b))

    wanted, tangents = jit(lambda: (of_all(step)(), of_all(pushed)()))()
    for got in (of_all(lambda f: fuse(step(f)))(), jit(of_all(lambda f: step(fuse(f))))()):
        same(got, wanted, times=8, floor=0.1)  # a norm of four features, and a loss of terms of both signs
    same(jit(of_all(lambda f: pushed(fuse(f))))(), tangents, times=8, floor=0.1)
