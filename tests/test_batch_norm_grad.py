"""The passes of batch norm's gradient as ops of their own: kernel and reference, every dtype and option, every transformation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arrays import array
from jaxfuse.ops.activations import named
from jaxfuse.ops.batch_norm_grad import DX, SUMS, GradientConfig

CASES = list(itertools.product(["float32", "bfloat16"], [False, True], [(4, 5, 6, 16), (3, 7), (2, 3, 5)]))


def arguments(dtype, masked, shape, seed=0):
    """(dy, x, mean, a, b, c, mask), the mask as batch_norm packs it."""
    rng = np.random.default_rng(seed)
    dy, x = (array(rng.standard_normal(shape), dtype) for _ in range(2))
    vectors = [array(rng.standard_normal(shape[-1]), jnp.float32) for _ in range(4)]
    mask = rng.random((np.prod(shape[:-1]), shape[-1])) < 0.5
    return (dy, x + 3, vectors[0] + 3, *vectors[1:]), mask, [jnp.packbits(mask, axis=-1, bitorder="little")] * masked


def close(made, expected, dtype):
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    scale = max(1, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(np.asarray(made, np.float64) / scale, expected / scale, atol=tolerance)


@pytest.mark.parametrize("dtype, masked, shape", CASES)
def test_against_float64(dtype, masked, shape, kernel):
    (dy, x, mean, a, b, c), mask, bits = arguments(dtype, masked, shape)
    wide_dy, wide_x, m, wa, wb, wc = (np.asarray(v, np.float64) for v in (dy, x, mean, a, b, c))
    g = np.where(mask.reshape(shape), wide_dy, 0) if masked else wide_dy
    config, axes = GradientConfig(len(shape) - 1, masked, wants_g=True), tuple(range(len(shape) - 1))
    sum_g, sum_gx = jax.jit(lambda *args: SUMS(config, *args))(dy, x, mean, *bits)
    close(sum_g, g.sum(axes), "float32")
    close(sum_gx, (g * (wide_x - m)).sum(axes), "float32")
    dx, made_g = jax.jit(lambda *args: DX(config, *args))(dy, x, mean, a, b, c, *bits)
    assert dx.dtype == x.dtype and made_g.dtype == dy.dtype
    close(dx, wa * g + wb * (wide_x - m) + wc, dtype)
    np.testing.assert_array_equal(np.asarray(made_g, np.float64), g)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("activation", ["maximum0", "clip", "silu", "gelu"])
def test_through_an_activation(activation, has_residual, dtype, kernel):
    """The derivative at z, recomputed; in float64 the definition's own."""
    (dy, x, mean, a, b, c), _, _ = arguments(dtype, False, (4, 5, 6, 16))
    saved = (mean, b, c, *[dy[::-1]] * has_residual)
    bound = 1.2  # of clip; z, rounded to bfloat16 as the kernel tells the derivative by, lies on the same side everywhere
    config = GradientConfig(3, wants_g=True, activation=named(activation, bound), has_residual=has_residual)
    made = [*jax.jit(lambda *args: SUMS(config, *args))(dy, x, mean, *saved), *DX(config, dy, x, mean, a, b, c, *saved)]
    with jax.enable_x64(True):
        wide = [array(v, np.float64) for v in (dy, x, mean, a, b, c, *saved)]
        exact = [*SUMS.reference(config, *wide[:3], *wide[6:]), *DX.reference(config, *wide)]
    for value, expected, of in zip(made, map(np.asarray, exact), ("float32", "float32", dtype, dtype)):
        assert value.dtype == of
        close(value, expected, of)


@pytest.mark.parametrize("masked", [False, True])
def test_transformations(masked, kernel):
    """vmap is a loop over the items; derivatives are those of the definition."""
    shape, config = (4, 3, 8), GradientConfig(2, masked)
    items = [arguments("float32", masked, shape, seed) for seed in range(3)]
    dy, x = (jnp.stack([args[i] for args, _, _ in items]) for i in (0, 1))
    (_, _, mean, a, b, c), _, bits = items[0]

    def both(dy, x):
        return [*SUMS(config, dy, x, mean, *bits), *DX(config, dy, x, mean, a, b, c, *bits)]

    looped = [jnp.stack(outs) for outs in zip(*(both(*item) for item in zip(dy, x)))]
    for made, expected in zip(jax.jit(jax.vmap(both))(dy, x), looped):
        np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)

    def by_definition(dy, x):
        references = SUMS.reference(config, dy, x, mean, *bits), DX.reference(config, dy, x, mean, a, b, c, *bits)
        return [out for outs in references for out in outs]

    for differentiate in (jax.jacfwd, jax.jacrev):
        for made, expected in zip(*(jax.tree.leaves(differentiate(f, (0, 1))(dy[0], x[0])) for f in (both, by_definition))):
            np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)


def test_nan_and_infinity_stay(kernel):
    (dy, x, mean, a, b, c), _, bits = arguments("float32", False, (2, 3, 8))
    dy, x = dy.at[0, 0, 1].set(jnp.nan), x.at[1, 2, 5].set(jnp.inf)
    config = GradientConfig(2)
    sums, (dx,) = SUMS(config, dy, x, mean), DX(config, dy, x, mean, a, b, c)
    expected, (expected_dx,) = SUMS.reference(config, dy, x, mean), DX.reference(config, dy, x, mean, a, b, c)
    for made, wanted in zip((*sums, dx), (*expected, expected_dx)):
        np.testing.assert_array_equal(np.isfinite(made), np.isfinite(wanted))


def test_refusals():
    (dy, x, mean, *_), _, _ = arguments("float32", False, (2, 3, 8))
    refused = {
        "cotangent bfloat16 of float32": SUMS.kernel(GradientConfig(2), (dy.astype(jnp.bfloat16), x, mean)),
        "channel axis 1": SUMS.kernel(GradientConfig(1), (dy, x, mean)),
        "dtype int32": DX.kernel(GradientConfig(2), (dy.astype(jnp.int32), x.astype(jnp.int32), mean)),
        "empty array": DX.kernel(GradientConfig(2), (dy[:0], x[:0], mean)),
    }
    for words, (kernel, reason) in refused.items():
        assert kernel is None and words in reason
    empty = jax.jit(lambda *args: SUMS(GradientConfig(2), *args))(dy[:0], x[:0], mean)
    assert not np.any(empty)
