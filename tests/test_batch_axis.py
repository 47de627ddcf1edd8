"""Convolutions whose batch is not the first axis: HWNC and CHWN, as plain lax writes them; and the weight gradients that look like them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from compare import jit, same
from layers import GAMMA, B, R, W, X
from recognition import correct, correct_with_gradients, directions, explain, fuse, patterns

ORDERS = {"HWNC": (1, 2, 0, 3), "CHWN": (3, 1, 2, 0)}
GEOMETRIES = {"plain": {}, "strided": dict(window_strides=(2, 1)), "grouped": dict(feature_group_count=2),
              "dilated": dict(rhs_dilation=(2, 2)), "depthwise": dict(feature_group_count=4)}


def layer(order, activation=jax.nn.relu, **kwargs):
    """The layer and its arguments in that layout."""
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=(order, "HWIO", order)) | kwargs
    groups = kwargs.get("feature_group_count", 1)
    up = lambda v: jnp.expand_dims(v, [d for d in range(4) if order[d] != "C"])

    def fn(x, w, b, r):
        y = lax.conv_general_dilated(x, w, **options) * up(GAMMA) + up(b)
        return activation(y + r if y.shape == r.shape else y)

    return fn, (X.transpose(ORDERS[order]), W[:, :, : 4 // groups], B, R.transpose(ORDERS[order]))


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("order", ORDERS)
def test_hit(order, geometry):
    fn, args = layer(order, **GEOMETRIES[geometry])
    label = "conv+bn+relu" if geometry == "strided" else "conv+bn+add+relu"
    assert patterns(fn, *args) == ([label], [])
    correct(fn, *args)


@pytest.mark.parametrize("order", ORDERS)
def test_gradient_of_the_fused_layer(order):
    fn, args = layer(order, jnp.tanh)
    correct_with_gradients(fn, *args)


@pytest.mark.parametrize("order", ORDERS)
def test_in_a_train_step(order):
    fn, args = layer(order, jax.nn.silu)
    step = jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), (0, 1, 2, 3))
    assert directions(step, *args) == ["backward conv+bn+add+silu", "conv+bn+add+silu"] and not explain(step, *args).skipped
    correct(step, *args)


def test_vmap():
    fn, args = layer("HWNC")
    many = jnp.stack([args[0], 2 * args[0]])
    same(*(jit(jax.vmap(lambda x: f(x, *args[1:])))(many) for f in (fuse(fn), fn)))


def weight_gradient(x, dy, **options):
    """By hand: the filter is as large as the image."""
    return lax.conv_general_dilated(x, dy, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("CHWN", "IHWO", "HWNC"), **options)


def test_a_weight_gradient_is_not_a_layer():
    assert directions(weight_gradient, X, R) == ["backward conv"]
    correct(weight_gradient, X, R)


def test_a_weight_gradient_that_is_wider_than_what_it_reads():
    wider = lambda x, dy: weight_gradient(x, dy, preferred_element_type=jnp.float32)
    fused, skipped = patterns(wider, X.astype(jnp.bfloat16), R.astype(jnp.bfloat16))
    assert not fused and "as a weight gradient has it" in skipped[0][1]
