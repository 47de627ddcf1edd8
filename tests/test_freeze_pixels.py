"""Packed filters that neighbouring pixels meet, of one tap or of few channels: bias, residual and activation follow in registers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from compare import same

pytestmark = pytest.mark.usefixtures("some_kernel")
ACTIVATIONS = dict(none=lambda z: z, relu=jax.nn.relu, relu6=jax.nn.relu6, silu=jax.nn.silu, gelu=jax.nn.gelu, tanh=jnp.tanh,
                   leaky=lambda z: jax.nn.leaky_relu(z, 0.1))
NEAR = {jnp.float32: dict(times=3), jnp.bfloat16: dict(times=3, floor=0.01)}


def layer(given, x, *residuals, activation="none", strides=(1, 1), padding="SAME", dilation=(1, 1)):
    w, b = given
    z = lax.conv_general_dilated(x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=("NHWC", "HWIO", "NHWC")) + b
    return ACTIVATIONS[activation](sum(residuals, z))


def arrays(image, w_shape, dtype, residual=False, **options):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = image, w_shape, w_shape[-1:]
    x, w, b = (jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]) if shape == w_shape else 1) for key, shape in zip(keys, shapes))
    x, given = x.astype(dtype), (w.astype(dtype), b.astype(dtype))
    y = jax.eval_shape(lambda given, x: layer(given, x, **options), given, x)
    return given, x, [jax.random.normal(keys[3], y.shape).astype(dtype)] * residual


def check(image, w_shape, dtype, residual=False, **options):
    given, x, residuals = arrays(image, w_shape, dtype, residual, **options)
    made = jaxfuse.freeze(lambda given, *rest: layer(given, *rest, **options), given, policy="always")
    same(made(x, *residuals), layer(given, x, *residuals, **options), **NEAR[dtype])
    assert any(name.startswith("packed") for name in made._constants)
    same(*(f(x[:0], *(r[:0] for r in residuals)) for f in (made, lambda *rest: layer(given, *rest, **options))))


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, residual, dtype):
    check((2, 9, 7, 24), (1, 1, 24, 70), dtype, residual, activation=activation)
    check((2, 11, 13, 3), (3, 3, 3, 70), dtype, residual, activation=activation, strides=(2, 2))


POINTWISE = {  # the image; features
    "one vector": ((1, 8, 8, 20), 16),
    "less than a vector": ((3, 5, 5, 9), 5),
    "a pair that is not full": ((2, 7, 8, 37), 40),
    "longest sums": ((1, 10, 10, 256), 100),
    "longer sums": ((1, 10, 10, 257), 300),
    "few rows": ((1, 5, 7, 16), 64),
    "most of a tile's columns": ((1, 7, 11, 48), 61),
    "few columns of a large image": ((2, 40, 41, 100), 33),
    "large": ((1, 80, 80, 64), 200),
}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", POINTWISE)
def test_one_tap(name, dtype):
    image, features = POINTWISE[name]
    check(image, (1, 1, image[-1], features), dtype, True, activation="relu")


FEW_CHANNELS = {  # the image, the filter, and the rest
    "stem": ((2, 32, 30, 3), (7, 7, 3, 64), dict(strides=(2, 2), padding=[(3, 3), (3, 3)])),
    "patches": ((2, 32, 36, 3), (4, 4, 3, 40), dict(strides=(4, 4), padding="VALID")),
    "one channel": ((1, 28, 28, 1), (5, 5, 1, 20), {}),
    "fifteen channels": ((1, 11, 12, 15), (3, 3, 15, 33), {}),
    "uneven": ((3, 13, 17, 2), (4, 3, 2, 18), dict(strides=(1, 3), padding=[(0, 2), (3, 1)])),
    "dilated": ((2, 15, 14, 5), (3, 2, 5, 24), dict(padding=[(2, 3), (0, 1)], dilation=(2, 1))),
    "columns of one pixel": ((2, 60, 3, 4), (3, 5, 4, 24), dict(padding=[(1, 1), (1, 1)])),
    "lines of one pixel": ((3, 5, 40, 4), (7, 3, 4, 24), dict(padding=[(1, 1), (1, 1)])),
    "nothing but padding above": ((1, 9, 9, 3), (3, 3, 3, 16), dict(padding=[(4, 0), (0, 4)])),
    "long sums": ((1, 12, 12, 14), (5, 5, 14, 40), {}),
}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", FEW_CHANNELS)
def test_few_channels(name, dtype):
    image, w_shape, options = FEW_CHANNELS[name]
    check(image, w_shape, dtype, True, activation="relu6", **options)


@pytest.mark.parametrize("shapes", [((2, 9, 7, 24), (1, 1, 24, 40)), ((2, 10, 12, 3), (3, 3, 3, 40))], ids=["one tap", "few channels"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_not_finite(shapes, activation):
    """Where it is for the plain layer: in x, in the residual, and where both meet."""
    given, x, (residual,) = arrays(*shapes, jnp.float32, True)
    made = jaxfuse.freeze(lambda given, x, r: layer(given, x, r, activation=activation), given, policy="always")
    for value in (jnp.nan, jnp.inf, -jnp.inf):
        for a, r in ((x.at[1, 3, 4, 1].set(value), residual), (x, residual.at[0, 2, 6, 35].set(value)),
                     (x.at[1, 3, 4, 1].set(value), residual.at[1, 3, 4, 35].set(-value))):  # fmt: skip
            found, wanted = np.asarray(made(a, r)), np.asarray(layer(given, a, r, activation=activation))
            np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
            np.testing.assert_array_equal(np.isposinf(found), np.isposinf(wanted))


def test_any_number_of_threads():
    """The same bits."""
    cases = ((1, 40, 41, 32), (1, 1, 32, 200)), ((2, 33, 31, 3), (7, 7, 3, 64)), ((5, 3, 4, 40), (1, 1, 40, 16))
    threads = jaxfuse.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3, 16, 64):
            jaxfuse.set_num_threads(count)
            found.append([])
            for image, w_shape in cases:
                given, x, _ = arrays(image, w_shape, jnp.float32)
                found[-1].append(jaxfuse.freeze(lambda given, x: layer(given, x, activation="silu"), given, policy="always")(x))
    finally:
        jaxfuse.set_num_threads(threads)
    for others in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], others)
