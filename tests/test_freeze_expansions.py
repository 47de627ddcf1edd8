"""A 1×1 convolution and the depthwise one behind it, the first half of an inverted residual, that `jaxfuse.freeze` computes together."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from compare import same
from layers import variables_of
from packed_programs import counts

pytestmark = pytest.mark.usefixtures("some_kernel")
NHWC = ("NHWC", "HWIO", "NHWC")


class InvertedResidual(nn.Module):
    """As MobileNetV2 has it."""

    dtype: jnp.dtype = jnp.float32
    strides: tuple = (1, 1)
    kernel: tuple = (3, 3)

    @nn.compact
    def __call__(self, x):
        def norm(y):
            return nn.BatchNorm(use_running_average=True, dtype=self.dtype)(y)

        h = jnp.clip(norm(nn.Conv(80, (1, 1), use_bias=False, dtype=self.dtype)(x)), 0, 6)
        depthwise = nn.Conv(80, self.kernel, self.strides, feature_group_count=80, use_bias=False, dtype=self.dtype)
        h = jnp.clip(norm(depthwise(h)), 0, 6)
        return norm(nn.Conv(x.shape[-1], (1, 1), use_bias=False, dtype=self.dtype)(h))


def positive_variances(model, x):
    variables = variables_of(model, x)
    return variables | dict(batch_stats=jax.tree.map(abs, variables["batch_stats"]))


@pytest.fixture
def expansions(monkeypatch):
    """How many each program that is made has."""
    return counts(monkeypatch, "_expansions")


@pytest.mark.parametrize("batch, strides, kernel", [(1, (1, 1), (3, 3)), (3, (2, 2), (5, 5))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_inverted_residual(dtype, batch, strides, kernel, expansions):
    """What vmap, autodiff and a fuse around it need is computed apart again."""
    model, x = InvertedResidual(dtype, strides, kernel), jax.random.normal(jax.random.key(0), (batch, 9, 14, 16), dtype)
    variables = positive_variances(model, x)
    made = jaxfuse.freeze(model.apply, variables, policy="always")
    near = dict(times=3) if dtype == jnp.float32 else dict(times=4, floor=0.02)
    wanted = model.apply(variables, x)
    same(made(x), wanted, **near)
    assert expansions == [1]
    same(jax.jit(made)(x), wanted, **near)
    same(jax.vmap(made)(x[:, None])[:, 0], wanted, **near)
    same(lax.map(made, x[None])[0], wanted, **near)
    plain = functools.partial(model.apply, variables)
    found, known = (jax.grad(lambda x, f=f: f(x).astype(jnp.float32).sum())(x) for f in (made, plain))
    same(found, known, times=20, floor=0.02)
    same(jaxfuse.fuse(lambda x: made(x) + 1)(x), wanted + 1, **near)


def test_in_a_file(tmp_path):
    model, x = InvertedResidual(), jax.random.normal(jax.random.key(0), (2, 7, 7, 16))
    variables = positive_variances(model, x)
    jaxfuse.freeze(model.apply, variables, policy="always").save(tmp_path / "net.jaxfuse", x)
    same(jaxfuse.load(tmp_path / "net.jaxfuse")(x), model.apply(variables, x), times=3)


def test_in_int8(expansions):
    """The expansion is in int8 then, or both are as they are."""
    model, x = InvertedResidual(), jax.random.normal(jax.random.key(0), (2, 7, 7, 16))
    variables = positive_variances(model, x)
    made = jaxfuse.freeze(model.apply, variables, int8=[x], policy="always", int8_error=1.0)
    same(made(x), model.apply(variables, x), floor=1, times=1e5)
    assert expansions[-1] == 0


ACTIVATIONS = dict(none=lambda z: z, relu=jax.nn.relu, relu6=jax.nn.relu6, silu=jax.nn.silu, hard_swish=jax.nn.hard_swish, tanh=jnp.tanh,
                   leaky=lambda z: jax.nn.leaky_relu(z, 0.1))


def weights(inputs, channels, kernel, key=0, dtype=jnp.float32):
    shapes = (1, 1, inputs, channels), (channels,), (*kernel, 1, channels), (channels,)
    keys = jax.random.split(jax.random.key(key), 4)
    return [(jax.random.normal(k, s) / np.sqrt(np.prod(s[:-1]))).astype(dtype) for k, s in zip(keys, shapes)]


def block(given, x, activation="relu6", strides=(1, 1), padding="SAME", dilation=(1, 1), between=lambda h: h):
    w, b, depthwise, c = given
    act = ACTIVATIONS[activation]
    h = between(act(lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=NHWC) + b))
    return act(lax.conv_general_dilated(h, depthwise, strides, padding, rhs_dilation=dilation, dimension_numbers=NHWC,
                                        feature_group_count=depthwise.shape[-1]) + c)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, expansions):
    check(weights(24, 48, (3, 3)), (2, 10, 11, 24), expansions, 1, activation=activation)


GEOMETRIES = {  # inputs, channels, kernel; image; the rest
    "long sums": (300, 33, (3, 3), (5, 6), {}),
    "a channel fewer than a vector": (7, 15, (3, 3), (6, 9), {}),
    "seven taps": (8, 40, (7, 7), (9, 16), {}),
    "taps of another number": (8, 40, (2, 4), (9, 16), {}),
    "a kernel that is not square": (8, 40, (5, 3), (9, 16), dict(strides=(2, 1))),
    "wider strides": (8, 40, (3, 3), (13, 16), dict(strides=(4, 3))),
    "dilation": (8, 40, (3, 3), (13, 16), dict(dilation=(2, 3))),
    "padding of another kind": (8, 40, (3, 3), (8, 9), dict(padding=((0, 3), (4, 1)))),
    "no padding": (8, 40, (3, 3), (8, 9), dict(padding="VALID")),
    "many lines": (16, 96, (3, 3), (64, 21), dict(strides=(2, 2))),
    "a line": (16, 96, (3, 3), (1, 40), {}),
    "a pixel": (16, 96, (3, 3), (1, 1), {}),
}


@pytest.mark.parametrize("inputs, channels, kernel, image, geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_geometries(dtype, inputs, channels, kernel, image, geometry, expansions):
    check(weights(inputs, channels, kernel, dtype=dtype), (2, *image, inputs), expansions, 1, **geometry)


@pytest.mark.parametrize("channels", [32, 24, 13])
def test_lines_of_every_width(channels, expansions):
    """Tiles of as many pixels as fit, and the one that is left."""
    widths = *range(1, 16), 27, 28, 29, 43
    for width in widths:
        check(weights(9, channels, (3, 3)), (1, 3, width, 9), expansions, 1)
        expansions.clear()


def test_without_biases(expansions):
    w, _, depthwise, _ = weights(16, 32, (3, 3))
    check([w, 0.0, depthwise, 0.0], (1, 7, 7, 16), expansions, 1)


def test_biases_in_another_dtype(expansions):
    """That of each channel is float32 where the rest is bfloat16."""
    w, b, depthwise, c = weights(16, 32, (3, 3))
    x = jax.random.normal(jax.random.key(5), (1, 7, 7, 16), jnp.bfloat16)

    def function(given, x):
        w, b, depthwise, c = given
        h = jax.nn.relu(convolved(x, w).astype(jnp.float32) + b).astype(x.dtype)
        return jax.nn.relu(convolved(h, depthwise, groups=32).astype(jnp.float32) + c).astype(x.dtype)

    given = w.astype(x.dtype), b, depthwise.astype(x.dtype), c
    same(jaxfuse.freeze(function, given, policy="always")(x), function(given, x), times=3, floor=0.02)
    assert expansions == [1]


def with_relu(given, x):
    return block(given, x, activation="relu")


def convolved(x, w, groups=1):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=groups)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["x", "w", "b", "depthwise"])
def test_what_is_not_finite(value, place):
    """It comes out where it comes out of the two convolutions: over padding a tap adds nothing."""
    given, x = weights(16, 40, (3, 3)), jax.random.normal(jax.random.key(1), (2, 6, 7, 16))
    if place == "x":
        x = x.at[1, 2, 0, 3].set(value)
    else:
        i = ("w", "b", "depthwise").index(place)
        given[i] = given[i].at[(0, 0, 0, 5)[4 - given[i].ndim :]].set(value)
    found = np.asarray(jaxfuse.freeze(with_relu, given, policy="always")(x))
    apart = np.asarray(jaxfuse.fuse(lambda x: with_relu(given, x), policy="always")(x))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(apart))
    assert not np.isfinite(with_relu(given, x)).all()


NEAR_MISSES = {
    "a second reader": lambda given, x: block(given, x, between=lambda h: h) + jax.nn.relu6(convolved(x, given[0]) + given[1]),
    "returned": lambda given, x: (h := jax.nn.relu6(convolved(x, given[0]) + given[1]), convolved(h, given[2], 48) + given[3]),
    "a sum in between": lambda given, x: block(given, x, between=lambda h: h + x.mean()),
    "another order of pixels": lambda given, x: block(given, x, between=lambda h: h[:, ::-1]),
    "a residual before": lambda given, x: convolved(jax.nn.relu6(convolved(x, given[0]) + jnp.tile(x, 2)), given[2], 48),
    "a residual behind": lambda given, x: convolved(jax.nn.relu6(convolved(x, given[0])), given[2], 48) + jnp.tile(x, 2),
    "a filter that is no constant": lambda given, x: convolved(convolved(x, given[0] * x[0, 0, 0, 0]), given[2], 48),
    "two features for a channel": lambda given, x: convolved(convolved(x, given[0]), jnp.repeat(given[2], 2, -1), 48),
    "groups of two": lambda given, x: convolved(convolved(x, given[0]), jnp.repeat(given[2], 2, 2), 24),
    "taps": lambda given, x: convolved(convolved(x, jnp.repeat(given[0], 3, 0)), given[2], 48),
    "strides": lambda given, x: convolved(
        lax.conv_general_dilated(x, given[0], (2, 2), "VALID", dimension_numbers=NHWC), given[2], 48),
}


@pytest.mark.parametrize("program", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_is_computed_apart(program, expansions):
    given, x = weights(24, 48, (3, 3)), jax.random.normal(jax.random.key(2), (2, 6, 6, 24))
    found, wanted = jaxfuse.freeze(program, given, policy="always")(x), program(given, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        same(a, b, times=3)
    assert expansions == [0]


def test_channels_first(expansions):
    """Is transposed as a whole, or computed apart."""
    w, b, depthwise, c = weights(24, 48, (3, 3))
    names, x = ("NCHW", "OIHW", "NCHW"), jax.random.normal(jax.random.key(2), (2, 24, 6, 6))

    def function(given, x):
        h = jax.nn.relu(lax.conv_general_dilated(x, given[0], (1, 1), "SAME", dimension_numbers=names) + b[:, None, None])
        return lax.conv_general_dilated(h, given[1], (1, 1), "SAME", dimension_numbers=names, feature_group_count=48) + c[:, None, None]

    given = w.transpose(3, 2, 0, 1), depthwise.transpose(3, 2, 0, 1)
    same(jaxfuse.freeze(function, given, policy="always")(x), function(given, x), times=3)
    assert len(expansions) == 1


def check(given, shape, expansions, expected, **options):
    x = jax.random.normal(jax.random.key(3), shape, given[0].dtype)
    near = dict(times=3) if x.dtype == jnp.float32 else dict(times=4, floor=0.02)
    made = jaxfuse.freeze(lambda given, x: block(given, x, **options), given, policy="always")
    same(made(x), block(given, x, **options), **near)
    assert expansions == [expected]
