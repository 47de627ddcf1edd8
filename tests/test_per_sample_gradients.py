"""Gradients of every sample by itself: vmap of a gradient. Fused from the outside they run what they run fused from within."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse

SAMPLES = 3
LAYERS = {
    "SAME": dict(),
    "VALID": dict(padding="VALID"),
    "strided": dict(window_strides=(2, 2)),
    "strided, the last places not read": dict(window_strides=(3, 2), padding="VALID"),
    "dilated": dict(rhs_dilation=(2, 2)),
    "strided and dilated": dict(window_strides=(2, 1), rhs_dilation=(1, 2), padding=((0, 2), (3, 1))),
    "transposed": dict(lhs_dilation=(2, 2), padding=((1, 2), (1, 2))),
    "grouped": dict(feature_group_count=2),
    "depthwise": dict(feature_group_count=4),
    "pointwise": dict(size=1),
    "NCHW": dict(dimension_numbers=("NCHW", "OIHW", "NCHW")),
    "HWNC": dict(dimension_numbers=("HWNC", "HWIO", "HWNC")),
    "1-D": dict(rank=1),
    "3-D": dict(rank=3),
}


def randn(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape, dtype)


def layer(rank=2, size=3, dimension_numbers=None, window_strides=None, padding="SAME", feature_group_count=1, images=1,
          dtype=jnp.float32, **options):
    """(loss, (w, b), x): a convolution with bias and relu of the images of one sample, and all samples."""
    letters = "DHW"[3 - rank :]
    names = dimension_numbers or (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    lengths = dict(zip("DHW", (4, 9, 8)), N=images, C=4, I=4 // feature_group_count, O=8)
    x = randn(SAMPLES, *[lengths[name] for name in names[0]], dtype=dtype)
    w = randn(*[lengths[name] if name in "IO" else size for name in names[1]], dtype=dtype)

    def loss(parameters, x):
        w, b = parameters
        y = lax.conv_general_dilated(x, w, window_strides or (1,) * rank, padding, dimension_numbers=names,
                                     feature_group_count=feature_group_count, **options)
        y = jax.nn.relu(y + jnp.expand_dims(b, [d for d, name in enumerate(names[2]) if name != "C"]))
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return loss, (w, randn(8, dtype=dtype)), x


def per_sample(loss, in_axes=(None, 0), argnums=0):
    return jax.vmap(jax.grad(loss, argnums), in_axes)


def backward(fn, *args):
    """The patterns of the fused backward rows."""
    return sorted(s.pattern for s in jaxfuse.explain(fn, *args, policy="always").fused if s.direction == "backward")


def check(fn, *args, tolerance=1e-4):
    made, known = (jax.jit(f)(*args) for f in (jaxfuse.fuse(fn, policy="always"), fn))
    for value, expected in zip(jax.tree.leaves(made), jax.tree.leaves(known), strict=True):
        assert value.dtype == expected.dtype
        wide = (np.asarray(a, np.float32) for a in (value, expected))
        np.testing.assert_allclose(*wide, tolerance, tolerance * max(1, float(jnp.abs(expected).max())))


@pytest.mark.parametrize("name", LAYERS)
def test_hit(name):
    loss, parameters, x = layer(**LAYERS[name])
    assert backward(per_sample(loss), parameters, x) == ["conv per sample"]
    check(per_sample(loss), parameters, x)


HITS = {
    "with the gradient of x": lambda loss: per_sample(loss, argnums=(0, 1)),
    "bias frozen": lambda loss: per_sample(lambda w, b, x: loss((w, b), x), (None, None, 0)),
    "of parameters of its own": lambda loss: per_sample(loss, ((0, None), 0)),
}


def test_several_images_in_a_sample():
    loss, parameters, x = layer(images=2)
    assert backward(per_sample(loss), parameters, x) == ["conv per sample"]
    check(per_sample(loss), parameters, x)


def test_bfloat16():
    loss, parameters, x = layer(dtype=jnp.bfloat16)
    assert backward(per_sample(loss), parameters, x) == ["conv per sample"]
    check(per_sample(loss), parameters, x, tolerance=2e-2)


def test_the_gradient_of_x_too():
    loss, parameters, x = layer()
    assert backward(per_sample(loss, argnums=(0, 1)), parameters, x) == ["conv", "conv per sample"]
    check(per_sample(loss, argnums=(0, 1)), parameters, x)
