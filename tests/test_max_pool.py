"""max_pool against lax.reduce_window and its gradient by XLA in float32: equal, not close."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from arrays import array
from jaxfuse import ops
from jaxfuse.runtime import ffi

OP_MODULE = importlib.import_module("jaxfuse.ops.max_pool")
nn = pytest.importorskip("flax.linen")
BF16 = jnp.bfloat16
DTYPES = [jnp.float32, BF16, jnp.float16]
needs_native = pytest.mark.skipif(
    ffi.unavailable("jaxfuse_max_pool_fwd") is not None, reason=str(ffi.unavailable("jaxfuse_max_pool_fwd"))
)

# x's shape, window, strides, padding
GEOMETRIES = {
    "3x3_stride2": ((2, 9, 12, 64), (3, 3), (2, 2), ((1, 1), (1, 1))),
    "2x2": ((3, 8, 6, 17), (2, 2), (2, 2), "VALID"),
    "overlapping": ((2, 7, 5, 16), (3, 2), (1, 1), "SAME"),
    "stride_beyond_window": ((2, 9, 11, 3), (2, 1), (3, 4), "VALID"),
    "one_channel": ((2, 10, 10, 1), (3, 3), (2, 2), "SAME"),
    "many_channels": ((1, 3, 3, 200), (3, 3), (1, 1), "SAME"),
    "windows_in_the_padding": ((2, 4, 3, 5), (2, 2), (1, 1), ((3, 2), (0, 4))),
    "more_positions_than_a_byte_holds": ((2, 20, 19, 5), (17, 16), (2, 3), "VALID"),
    "window_beyond_x": ((2, 3, 4, 8), (5, 5), (1, 1), "VALID"),
    "several_blocks": ((1, 150, 40, 65), (5, 3), (2, 2), ((2, 2), (1, 1))),
    "1d": ((3, 301, 20), (4,), (3,), ((1, 2),)),
    "3d": ((2, 5, 6, 7, 24), (2, 3, 3), (1, 2, 2), "SAME"),
    "3d_window_1_first": ((2, 3, 6, 6, 8), (1, 2, 2), (1, 2, 2), "VALID"),
}
SMALL = GEOMETRIES["3x3_stride2"]


def by_xla(x, window, strides, padding):
    return nn.max_pool(x, window, strides, padding)


def by_op(x, window, strides, padding):
    return ops.max_pool(x, window, strides=strides, padding=padding)


def plain(*args):
    """Under a name of its own: what was compiled for `by_op` holds its kernels."""
    return by_op(*args)


def values(kind, shape, dtype, seed=0):
    """Few values, hence ties; many zeros, as after relu; or NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    draw = dict(
        normal=lambda: rng.normal(size=shape),
        relu=lambda: np.maximum(rng.integers(-6, 3, size=shape), 0),
        special=lambda: rng.choice([np.nan, -np.inf, np.inf, 0, 1, -1], size=shape, p=[0.06, 0.6, 0.04, 0.1, 0.1, 0.1]),
    )
    return array(draw[kind](), dtype)


@functools.partial(jax.jit, static_argnums=(0, 3))
def value_and_gradient(function, x, dy, geometry):
    y, vjp = jax.vjp(lambda x: function(x, *geometry), x)
    return y, vjp(dy)[0]


def cotangent(x, geometry):
    y = jax.eval_shape(lambda x: by_xla(x, *geometry), x)
    return array(np.random.default_rng(1).normal(size=y.shape), y.dtype)


def check_against_xla(x, geometry, by=by_op):
    dy = cotangent(x, geometry)
    got = value_and_gradient(by, x, dy, geometry)
    # in float32, because in bfloat16 XLA rounds after every addition
    wide = value_and_gradient(by_xla, x.astype(jnp.float32), dy.astype(jnp.float32), geometry)
    for value, expected in zip(got, wide):
        same(value, expected.astype(x.dtype))


def same(value, expected):
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (value, expected)))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_value_and_gradient(name, dtype):
    shape, *geometry = GEOMETRIES[name]
    for kind in ("normal", "relu", "special"):
        check_against_xla(values(kind, shape, dtype), tuple(geometry))


@pytest.mark.parametrize("name", GEOMETRIES)
def test_without_a_kernel(name, monkeypatch):
    """Plain JAX, as on a GPU: winners are kept, and the gradient sums in float32; beyond 64 positions it is XLA's own."""
    monkeypatch.setattr(ffi, "unavailable", lambda target: "switched off by the test")
    shape, *geometry = GEOMETRIES[name]
    dtype = BF16 if np.prod(geometry[0]) <= OP_MODULE.UNROLLED else jnp.float32
    for kind in ("relu", "special"):
        x = values(kind, shape, dtype)
        check_against_xla(x, tuple(geometry), by=plain)
    lowered = value_and_gradient.lower(plain, x, cotangent(x, geometry), tuple(geometry)).as_text()
    assert ("select_and_scatter" in lowered) == (dtype == jnp.float32) and "custom_call" not in lowered


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_winners_are_those_of_the_reference(name, dtype):
    shape, window, strides, padding = GEOMETRIES[name]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(shape[1:-1], window, strides, padding)
    ones = (1,) * len(shape)
    config = OP_MODULE.MaxPoolConfig((1, *window, 1), (1, *strides, 1), ((0, 0), *padding, (0, 0)), ones, ones, with_residuals=True)
    for kind in ("normal", "relu", "special"):
        x = values(kind, shape, dtype)
        got, expected = OP_MODULE.OP(config, x), jax.jit(functools.partial(OP_MODULE._reference, config))(x)
        jax.tree.map(same, list(got), list(expected))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_repeatable(dtype):
    shape, *geometry = GEOMETRIES["several_blocks"]
    x = values("normal", shape, dtype)
    dy = cotangent(x, geometry)
    first, *others = (value_and_gradient(by_op, x, dy, tuple(geometry)) for _ in range(5))
    for other in others:
        jax.tree.map(same, other, first)


def loss(function):
    return lambda x: jnp.sum(jnp.sin(function(x, *SMALL[1:])))


@needs_native
def test_kernels_are_used():
    def native(x):
        text = jax.jit(jax.grad(loss(by_op))).lower(x).as_text()
        return ["jaxfuse_max_pool_fwd" in text, "jaxfuse_max_pool_bwd" in text]

    assert native(values("normal", SMALL[0], BF16)) == [True, True]
    assert native(values("normal", SMALL[0], jnp.float16)) == [True, True]
    assert native(jnp.zeros((0, *SMALL[0][1:]))) == [False, False]


@pytest.mark.parametrize("arguments, words", [
    ((jnp.ones((4, 4)), (2,)), "rank 3, 4 or 5"),
    ((jnp.ones((1, 4, 4, 1), int), (2, 2)), "a float dtype"),
    ((jnp.ones((1, 4, 4, 1)), (2,)), "window_shape is .*2 positive integers"),
    ((jnp.ones((1, 4, 4, 1)), (2, 2), (0, 1)), "strides is .*2 positive integers"),
    ((jnp.ones((1, 4, 4, 1)), (2, 2), (1, 1), "SAM"), "did you mean 'SAME'"),
    ((jnp.ones((1, 4, 4, 1)), (2, 2), (1, 1), ((0, -1), (0, 0))), "padding is .*not negative"),
])  # fmt: skip
def test_errors_in_words(arguments, words):
    x, window, *rest = arguments
    with pytest.raises(ops.OpError, match=words):
        ops.max_pool(x, window, **dict(zip(("strides", "padding"), rest)))


# --- found by fuse -------------------------------------------------------------------------------------------------

X = values("normal", (2, 8, 8, 16), jnp.float32)


def window(x, init, function, dims, strides=(1, 2, 2, 1), padding="VALID", **dilations):
    return lax.reduce_window(x, init, function, dims, strides, padding, **dilations)


HITS = {
    "flax": lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"),
    "flax, one item": lambda x: nn.max_pool(x[0], (2, 2), (2, 2)),
    "lax": lambda x: window(x, -jnp.inf, lax.max, (1, 3, 3, 1), padding="SAME"),
    "lax, numpy init": lambda x: window(x, np.float32(-np.inf), lax.max, (1, 3, 3, 1)),
    "vmapped": lambda x: jax.vmap(lambda x: nn.max_pool(x, (2, 2)))(x[:, None]),
    "after relu, in a scan": lambda x: lax.scan(lambda c, x: (c, nn.max_pool(jax.nn.relu(x), (2, 2))), 0, x[:, None])[1],
}
MISSES = {
    "channels first": (lambda x: window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2)), "pools axis 3, the channel axis"),
    "over the batch": (lambda x: window(x, -jnp.inf, lax.max, (2, 2, 2, 1)), "pools axis 0, the batch axis"),
    "dilated window": (
        lambda x: window(x, -jnp.inf, lax.max, (1, 2, 2, 1), window_dilation=(1, 2, 2, 1)), "window_dilation (1, 2, 2, 1)"),
    "dilated base": (
        lambda x: window(x, -jnp.inf, lax.max, (1, 2, 2, 1), base_dilation=(1, 2, 1, 1)), "base_dilation (1, 2, 1, 1)"),
    "negative padding": (
        lambda x: window(x, -jnp.inf, lax.max, (1, 2, 2, 1), padding=((0, 0), (-1, 0), (0, 0), (0, 0))), "negative padding"),
    "rank 2": (lambda x: window(x[0, 0], -jnp.inf, lax.max, (2, 1), (2, 1)), "rank 2"),
}  # fmt: skip
UNTOUCHED = {
    "min pool": lambda x: window(x, jnp.inf, lax.min, (1, 2, 2, 1)),
    "average pool": lambda x: nn.avg_pool(x, (2, 2)),
    "max from 0": lambda x: window(x, 0.0, lax.max, (1, 2, 2, 1)),
}


@needs_native
@pytest.mark.parametrize("name", HITS)
def test_found(name):
    report = jaxfuse.explain(HITS[name], X)
    assert [(s.pattern, s.kernel) for s in report.fused] == [("max_pool", "native")] and not report.skipped
    np.testing.assert_array_equal(jaxfuse.fuse(HITS[name])(X), HITS[name](X))


@pytest.mark.parametrize("name", [*MISSES, *UNTOUCHED])
def test_not_found(name):
    """With its reason where it is a max pool."""
    fn, reason = MISSES.get(name) or (UNTOUCHED[name], "")
    report = jaxfuse.explain(fn, X, policy="always")
    assert not report.fused and [site.pattern for site in report.skipped] == ["max_pool"] * (name in MISSES)
    assert all(reason in site.reason for site in report.skipped)
    np.testing.assert_array_equal(jaxfuse.fuse(fn, policy="always")(X), fn(X))


# --- the targets ---------------------------------------------------------------------------------------------------

GOOD = dict(window_dimensions=[3, 3], window_strides=[2, 2], padding_low=[0, 0], padding_high=[0, 0])


def targets(x, dy, **attrs):
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (dy, x)]
    winners = jax.ShapeDtypeStruct(dy.shape, jnp.uint8)
    outs = ffi.call("jaxfuse_max_pool_fwd", [like[0], winners], x, save_winners=True, **GOOD | attrs)
    ffi.call("jaxfuse_max_pool_bwd", [like[1]], outs[1], dy, **GOOD | attrs)[0].block_until_ready()


@needs_native
@pytest.mark.parametrize("shapes, attrs, words", [
    (((2, 7, 7, 4), (2, 3, 3, 5)), {}, r"y has shape \(2, 3, 3, 5\), expected \(2, 3, 3, 4\)"),
    (((2, 7), (2, 3)), {}, "expected a batch, 1 to 3 spatial dimensions"),
    (((2, 7, 7, 4), (2, 3, 3, 4)), dict(window_strides=[2]), r"window_strides is \(2,\), expected 2 numbers"),
    (((2, 7, 7, 4), (2, 3, 3, 4)), dict(window_strides=[2, 0]), "from 1 to"),
    (((2, 7, 7, 4), (2, 3, 3, 4)), dict(padding_low=[-1, 0]), r"padding_low is \(-1, 0\).*from 0 to"),
    (((2, 7, 7, 4), (2, 0, 0, 4)), dict(window_dimensions=[2**20, 2**20]), "positions"),
    (((2, 7, 7, 4), (2, 0, 0, 4)), dict(window_dimensions=[2**40, 1]), "window_dimensions is"),
])  # fmt: skip
def test_targets_refuse(shapes, attrs, words):
    with pytest.raises(Exception, match=words):
        targets(*map(jnp.ones, shapes), **attrs)


@needs_native
def test_targets_refuse_dtypes():
    x, dy = jnp.ones((2, 7, 7, 4)), jnp.ones((2, 3, 3, 4))
    targets(x, dy)
    with pytest.raises(Exception, match="y has dtype bfloat16, expected float32"):
        targets(x, dy.astype(BF16))
    with pytest.raises(Exception, match="x has dtype .*expected float32 or bfloat16 or float16"):
        targets(x.astype(jnp.int32), dy)


@needs_native
def test_targets_take_empty_arrays():
    targets(jnp.ones((0, 7, 7, 4)), jnp.ones((0, 3, 3, 4)))
    targets(jnp.ones((2, 7, 7, 0)), jnp.ones((2, 3, 3, 0)))
    targets(jnp.ones((2, 1, 1, 4)), jnp.ones((2, 0, 0, 4)))


# --- with and without the kernels (last: without them it stays until the end of the file) ----------------------------

TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(loss(f)),
    "vmap": lambda f: jax.vmap(lambda x: f(x, *SMALL[1:])),
    "vmap of the last axis": lambda f: lambda x: jax.vmap(lambda x: f(x, *SMALL[1:]), -1, -1)(jnp.moveaxis(x, 0, -1)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss(f))),
    "jvp": lambda f: lambda x: jax.jvp(lambda x: f(x, *SMALL[1:]), (x,), (jnp.cos(x),)),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(loss(f)), (x,), (jnp.cos(x),)),
    "scan": lambda f: lambda x: lax.scan(lambda carry, x: (carry, f(x, *SMALL[1:])), 0.0, x)[1],
    "grad of scan": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(TRANSFORMATIONS["scan"](f)(x)))),
}
STACKED = [name for name in TRANSFORMATIONS if "vmap" in name or "scan" in name]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformation(name, kernel):
    shape = (3, *SMALL[0]) if name in STACKED else SMALL[0]
    x = values("normal", shape, jnp.float32)
    got, expected = (jax.jit(TRANSFORMATIONS[name](f))(x) for f in (by_op, by_xla))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, expected)
