"""A layer is found whatever stands before or after it, in both directions of a train step."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from layers import BETA, GAMMA, ZR, Z, batch_norm, conv, randn
from recognition import differentiated, explain
from spellings.norm import group_norm, layer_norm, rms_norm

FILTER, KERNEL, MATRIX = randn(3, 3, 8, 8) / 6, randn(3, 3, 1, 8) / 2, randn(8, 8) / 2


def attention(x, g, b):
    q = x.reshape(4, 36, 2, 4)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * g[:4], q + b[:4]) / 2
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q).reshape(x.shape)


LAYERS = {
    "conv": lambda x, g, b: conv(x, FILTER * g) + b,
    "conv, silu": lambda x, g, b: jax.nn.silu(conv(x, FILTER * g) + b),
    "conv, depthwise, relu6": lambda x, g, b: jax.nn.relu6(conv(x, KERNEL * g, feature_group_count=8) + b),
    "bn": batch_norm,
    "bn, relu": lambda x, g, b: jax.nn.relu(batch_norm(x, g, b)),
    "bn, add, silu": lambda x, g, b: jax.nn.silu(batch_norm(x, g, b) + ZR),
    "dense, gelu": lambda x, g, b: jax.nn.gelu(x @ (MATRIX * g) + b),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "group_norm, silu": lambda x, g, b: jax.nn.silu(group_norm(x, g, b)),
    "attention": attention,
}
NEIGHBOURS = {
    **{f.__name__: f for f in (jax.nn.relu, jax.nn.silu, jax.nn.gelu, jax.nn.softmax, jnp.tanh, jnp.square, jnp.abs)},
    "exp": lambda x: jnp.exp(x / 10),
    "clip": lambda x: jnp.clip(x, -1, 1),
    "residual": lambda x: x + ZR,
    "product": lambda x: x * ZR,
    "scale": lambda x: x * GAMMA,
    "scale of each example": lambda x: x * ZR[:, :1, :1],
    "dropout": lambda x: jnp.where(ZR > 0, x / 0.5, 0),
    "stochastic depth": lambda x: x * (ZR[:, :1, :1, :1] > 0),
    "squeeze and excite": lambda x: x * jax.nn.sigmoid(x.mean((1, 2), keepdims=True)),
    "gate": lambda x: x * jax.nn.sigmoid(jnp.roll(x, 1, -1)),
    "straight through": lambda x: x + lax.stop_gradient(jnp.round(x) - x),
    "concatenated": lambda x: jnp.concatenate([x[..., :4], ZR[..., :4]], -1),
    "padded": lambda x: jnp.pad(x[:, :5], ((0, 0), (0, 1), (0, 0), (0, 0))),
    "flipped": lambda x: x[:, ::-1],
    "transposed": lambda x: x.transpose(0, 2, 1, 3),
    "shuffled channels": lambda x: x.reshape(4, 6, 6, 2, 4).swapaxes(3, 4).reshape(x.shape),
    "gathered": lambda x: x[jnp.array([2, 0, 1, 3])],
    "max pool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME"),
    "average pool": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME") / 4,
    "to unit length": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
}
PLACES = {"before": lambda layer, u: lambda x, g, b: layer(u(x), g, b), "after": lambda layer, u: lambda x, g, b: u(layer(x, g, b))}


def sites(fn) -> collections.Counter:
    """(direction, op) of what is fused of value and gradients: a layer may take in what stands beside it."""
    ops = {layer.split(",")[0] for layer in LAYERS} | {"dense_grad"}
    fused = explain(differentiated(fn, Z, GAMMA, BETA), Z, GAMMA, BETA).fused
    return collections.Counter((site.direction, step) for site in fused for step in site.pattern.split("+") if step in ops)


@pytest.mark.costly
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", LAYERS)
def test_neighbours(name, place):
    alone = sites(LAYERS[name])
    assert {direction for direction, _ in alone} == {"forward", "backward"}
    assert {} == {n: lost for n, u in NEIGHBOURS.items() if (lost := alone - sites(PLACES[place](LAYERS[name], u)))}
