"""Convolutions of one channel with one filter, which are sums of taps: by themselves, and for each sample of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from compare import distance
from jaxfuse import ops

# name: (x, w, options)
GEOMETRIES = {
    "even, valid": ((3, 5, 5, 1), (2, 2, 1, 1), dict(padding="VALID")),
    "padded more on one side": ((2, 6, 5, 1), (3, 2, 1, 1), dict(padding=((2, 0), (0, 1)))),
    "dilated": ((2, 9, 8, 1), (3, 2, 1, 1), dict(rhs_dilation=(2, 3))),
    "sequence": ((2, 11, 1), (5, 1, 1), {}),
    "three dimensions": ((1, 4, 5, 3, 1), (2, 3, 1, 1, 1), {}),
    "channels first": ((2, 1, 6, 4), (1, 1, 3, 3), dict(dimension_numbers=("NCHW", "OIHW", "NCHW"))),
    "no output": ((2, 2, 1), (3, 1, 1), dict(padding="VALID")),
}


def arguments(name, dtype="float32"):
    random = np.random.default_rng(0)
    *shapes, options = GEOMETRIES[name]
    return [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes], options


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_as_xla_computes_it_and_its_gradients(name, dtype):
    (x, w), options = arguments(name, dtype)
    dn = options.get("dimension_numbers", ("NWC", "WIO", "NWC") if x.ndim == 3 else ("NHWC", "HWIO", "NHWC") if x.ndim == 4 else
                     ("NDHWC", "DHWIO", "NDHWC"))  # fmt: skip

    def fused(x, w, bias):
        return ops.conv(x, w, bias, activation="silu", **options)

    def plain(x, w, bias):
        strides, rest = (1,) * (x.ndim - 2), dict(padding="SAME", dimension_numbers=dn) | options
        return jax.nn.silu(lax.conv_general_dilated(x, w, strides, **rest) + bias)

    def gradients(function, *args):
        y, pullback = jax.vjp(function, *args)
        return y, *pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    args = x, w, jnp.ones(1, dtype)
    lowered = jax.jit(lambda *args: gradients(fused, *args)).lower(*args)
    assert "jaxfuse_conv" not in lowered.as_text() and "stablehlo.convolution" not in lowered.as_text()
    expected = gradients(plain, *[a.astype(jnp.float32) for a in args])
    for value, truth in zip(lowered.compile()(*args), expected, strict=True):
        assert value.shape == truth.shape and value.dtype == dtype
        assert value.size == 0 or distance(value, truth) < (2e-5 if dtype == "float32" else 2e-2)


def test_gradients_of_every_sample_are_one_program():
    """Of x, and of a filter that all samples share, which has no batch axis: no loop over the samples."""
    (x, w), options = arguments("even, valid")
    x = jnp.stack([x, 2 * x, x + 1])

    def loss(function):
        return lambda x, w: (function(x, w) ** 3).sum()

    def gradients(function):
        return jax.vmap(jax.grad(loss(function), (0, 1)), (0, None))

    def plain(x, w):
        return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    fused = gradients(jaxfuse.fuse(plain))
    assert "scan" not in str(jax.make_jaxpr(fused)(x, w))
    for value, truth in zip(jax.jit(fused)(x, w), gradients(plain)(x, w), strict=True):
        assert distance(value, truth) < 2e-6


def test_it_is_for_one_channel_and_few_taps():
    """More channels, a stride, a spread x or many taps are for the other kernels; so is the gradient of a large x."""

    def kernels(x, w, strides=(1, 1), backward=False, **options):
        def layer(x, w):
            return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options).sum()

        report = jaxfuse.explain(jax.grad(layer, (0, 1)) if backward else layer, jnp.zeros(x), jnp.zeros(w), policy="always")
        return {site.kernel for site in report.fused if (site.direction == "backward") == backward}

    def taps(*args, **options):
        return "taps" in kernels(*args, **options)

    small, three = (1, 6, 6, 1), (3, 3, 1, 1)
    assert taps(small, three) and taps(small, three, backward=True) and taps((1, 64, 64, 1), three)
    assert not taps((1, 64, 64, 1), three, backward=True)
    assert not taps((1, 6, 6, 2), (3, 3, 2, 1)) and not taps(small, (3, 3, 1, 2))
    assert not taps((1, 6, 6, 2), (3, 3, 1, 2), feature_group_count=2)
    assert not taps(small, three, (2, 1)) and not taps(small, (9, 8, 1, 1))
