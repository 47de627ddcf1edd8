"""Convolutions by a filter of one place, channels first, which are products of matrices; what is left to the other kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfuse
from compare import distance
from jaxfuse.ops.conv import pointwise
from jaxfuse.patterns.conv.forward import config_of
from jaxfuse.program.graph import Graph
from recognition import randn

FIRST, LAST = ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")
X, W, B = randn(2, 6, 24, 22), randn(5, 6, 1, 1), randn(5, seed=1)


def layer(x, w, b, strides=(1, 1), padding="VALID", names=FIRST, **options):
    y = lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=names, **options)
    return jax.nn.silu(y + jnp.expand_dims(b, [d for d in range(y.ndim) if d != names[2].index("C")]))


def gradients(function):
    return lambda *args: jax.vjp(function, *args)[1](jnp.cos(jnp.arange(args[0].shape[0] * 5 * 528.0)).reshape(-1, 5, 24, 22))


@pytest.mark.parametrize("batch", [1, 2])
def test_as_xla_computes_it_and_its_gradients(batch):
    x = X[:batch]
    fused = jaxfuse.fuse(layer, policy="always")
    lowered = jax.jit(gradients(fused)).lower(x, W, B)
    assert "jaxfuse_conv" not in lowered.as_text() and "stablehlo.convolution" not in lowered.as_text()
    assert distance(jax.jit(fused)(x, W, B), layer(x, W, B)) < 2e-6
    for value, truth in zip(lowered.compile()(x, W, B), gradients(layer)(x, W, B), strict=True):
        assert distance(value, truth) < 2e-6


def test_turned_filter_and_one_dimension():
    def turned(x, w, b):
        return layer(x, w.transpose(2, 3, 1, 0), b, names=("NCHW", "HWIO", "NCHW"))

    def sequence(x, w, b):
        y = lax.conv_general_dilated(x.reshape(2, 6, 528), w[..., 0], (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH"))
        return jax.nn.silu(y + b[:, None])

    for program in (turned, sequence):
        assert [site.kernel for site in jaxfuse.explain(program, X, W, B, policy="always").fused] == ["product"]
        assert distance(jaxfuse.fuse(program, policy="always")(X, W, B), program(X, W, B)) < 2e-6


MISSES = {
    "channels last": (dict(names=LAST), X.transpose(0, 2, 3, 1), W.transpose(2, 3, 1, 0), "channels first"),
    "strides": (dict(strides=(2, 1)), jnp.tile(X, (1, 1, 2, 1)), W, "window_strides (2, 1)"),
    "padding": (dict(padding=((1, 0), (0, 0))), X, W, "padding ((1, 0), (0, 0))"),
    "larger filter": ({}, X, jnp.tile(W, (1, 1, 2, 1)), "one place"),
    "groups": (dict(feature_group_count=3), X, jnp.tile(W[:, :2], (3, 1, 1, 1))[:6], "feature_group_count 3"),
    "few places": ({}, X[:, :, :22], W, "484 places"),
    "more features than places": ({}, X, jnp.tile(W, (106, 1, 1, 1)), "530 features, 528 places"),
    "bfloat16": ({}, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), "dtype bfloat16"),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_miss(name):
    options, x, w, words = MISSES[name]
    features = w.shape[3 if options.get("names") == LAST else 0]
    program = functools.partial(layer, **options)
    args = x, w, randn(features).astype(x.dtype)
    (node,) = [n for n in Graph(jax.make_jaxpr(program)(*args)).nodes if n.primitive == "conv_general_dilated"]
    assert words in pointwise.refuse(config_of(node), x, w)
    assert "product" not in [site.kernel for site in jaxfuse.explain(program, *args, policy="always").fused]
