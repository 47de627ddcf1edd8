"""Gradients that are sums over very many pixels or rows err by no more than a few units of float32, whatever the shapes are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_oracle import BF16, F32, MANY_PIXELS, backward, gradients, random
from exact import in_float64

import jaxfuse
from jaxfuse import ops
from jaxfuse.runtime import ffi
from layers import conv
from processes import printed_by
from spellings.norm import centered, layer_norm

pytestmark = pytest.mark.skipif(ffi.no_onednn() is not None, reason=str(ffi.no_onednn()))
UNITS = 5  # of float32, 2**-23
LEVELS = {"avx2": dict(JAXFUSE_SIMD="avx2", ONEDNN_MAX_CPU_ISA="AVX2"), "portable": dict(JAXFUSE_SIMD="portable")}


def error(got, want):
    """Root mean square, relative, in units of float32."""
    return np.sqrt(np.mean((np.float64(got) - want) ** 2) / np.mean(np.float64(want) ** 2)) * 2.0**23


def positive(shape, seed=0):
    """Numbers of one sign, as a relu leaves them."""
    return jnp.abs(random(shape, seed=seed))


def filter_error(case, dtype=F32):
    x, g = positive(case.x).astype(dtype), random(case.y, dtype, 1)
    found = backward(case, x, jnp.zeros(case.w, dtype), g, None, "none", want=("dw", "db"))
    bias = np.float64(g).sum(tuple(i for i in range(g.ndim) if i != case.specs.out_spec[1]))
    return error(found["dw"], gradients(case, x, np.zeros(case.w), g)[1]), error(found["db"], bias)


@pytest.mark.parametrize("name", MANY_PIXELS)
def test_filter_gradient(name):
    assert max(filter_error(MANY_PIXELS[name])) <= UNITS


@pytest.mark.parametrize("name", ["1-D, one input", "depthwise, NCHW", "3-D"])
def test_filter_gradient_of_bfloat16(name):
    """Its sums are rounded once, where oneDNN has no kernels for it; what it makes of them elsewhere is its own."""
    of_filter, of_bias = filter_error(MANY_PIXELS[name], BF16)
    assert of_filter <= 2.0**16 and of_bias <= UNITS


def main():
    for name, case in MANY_PIXELS.items():
        assert max(filter_error(case)) <= UNITS, name
    print("all")


@pytest.mark.parametrize("level", LEVELS)
def test_filter_gradient_of_lesser_instruction_sets(level):
    if ffi.native().info()["simd"] in (level, "portable"):
        pytest.skip(f"this CPU has no more than {level}")
    assert printed_by(__file__, **LEVELS[level]) == "all\n"


dilated = functools.partial(conv, lhs_dilation=(2, 2))
OTHERS = {
    "transposed": (functools.partial(dilated, padding=((2, 2), (2, 2))), (2, 40, 41, 12), (4, 4, 12, 16)),
    "transposed, groups": (
        functools.partial(dilated, padding=((2, 1), (1, 2)), feature_group_count=3), (1, 40, 41, 12), (3, 3, 4, 6)),
    "transposed, depthwise": (
        functools.partial(dilated, padding=((1, 1), (1, 1)), feature_group_count=8), (1, 40, 41, 8), (3, 3, 1, 8)),
    "dense": (lambda x, w, b: jax.nn.gelu(x @ w + b), (60000, 6), (6, 10), (10,)),
    "layer norm": (functools.partial(layer_norm, of=centered), (40000, 16), (16,), (16,)),
    "batch norm": (functools.partial(layer_norm, of=centered, axes=0), (60000, 8), (8,), (8,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_parameters(name):
    function, *shapes = OTHERS[name]
    args = [positive(shapes[0]), *(random(shape, seed=i) for i, shape in enumerate(shapes[1:], 1))]
    g = random(jax.eval_shape(function, *args).shape, seed=9)
    fused = jaxfuse.fuse(function, policy="always")
    assert jaxfuse.explain(function, *args, policy="always").fused
    found = jax.jit(lambda args: jax.vjp(fused, *args)[1](g))(args)
    want = in_float64(lambda args, g: jax.vjp(function, *args)[1](g), args, g)
    for got, exact in zip(found[1:], want[1:]):
        assert error(got, np.asarray(exact)) <= UNITS


ALIKE = {
    "dense": (lambda x, w, b: x @ w + b, (60000, 6), (6, 10), (10,)),
    "layer norm": OTHERS["layer norm"],
    "batch norm": OTHERS["batch norm"],
    "instance norm": (functools.partial(layer_norm, of=centered, axes=(1, 2)), (2, 56, 56, 24), (24,), (24,)),
    "batch norm of images": (functools.partial(layer_norm, of=centered, axes=(0, 1, 2)), (2, 56, 56, 24), (24,), (24,)),
    "convolution": (lambda x, w, b: conv(x, w) + b, (2, 56, 56, 24), (1, 1, 24, 24), (24,)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_the_same_gradient_everywhere(name):
    """As behind a mean over the pixels: all additions may err to one side. The last parameter's gradient is the sum of it."""
    function, *shapes = ALIKE[name]
    args = [positive(shapes[0]), *(random(shape, seed=i) for i, shape in enumerate(shapes[1:], 1))]
    y = jax.eval_shape(function, *args)
    each = np.asarray(random(y.shape[-1:], seed=9))
    fused = jaxfuse.fuse(function, policy="always")
    found = jax.jit(lambda args, g: jax.vjp(fused, *args)[1](g)[-1])(args, jnp.broadcast_to(each, y.shape))
    assert error(found, np.float64(each) * (np.prod(y.shape) / y.shape[-1])) <= UNITS


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "silu"])
@pytest.mark.parametrize("dtype, most", [("bfloat16", 2e-2), ("float16", 2.5e-3)])
def test_scale_of_16_bits(dtype, most, activation):
    """Whose gradient is a sum over that of the filter that the scale was multiplied into, and rounded."""
    shapes = (4, 10, 10, 16), (3, 3, 16, 8), (8,), (8,), (4, 10, 10, 8)
    x, w, scale, bias, g = (random(shape, dtype, seed) for seed, shape in enumerate(shapes))
    args = x + 0.5, w / 6, 1 + scale / 4, bias

    def plain(x, w, scale, bias):
        return getattr(jax.nn, activation)(conv(x, w) * scale + bias)

    def fused(x, w, scale, bias):
        return ops.conv(x, w, scale=scale, bias=bias, activation=activation)

    of_scale = lambda f: jax.jit(lambda args, g: jax.vjp(f, *args)[1](g)[2])
    exact = np.asarray(in_float64(of_scale(plain), args, g))
    ours, unfused = (error(of_scale(f)(args, g), exact) / 2.0**23 for f in (fused, plain))
    assert ours <= max(most, unfused)


if __name__ == "__main__":
    main()
