"""The native batch-norm targets against numpy: the element-wise ones to the bit, sums against float64."""

import concurrent.futures
import hashlib
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attributes import attributes
from jaxfuse.runtime import ffi
from processes import python

UNAVAILABLE = ffi.unavailable("jaxfuse_batch_norm_stats")
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))

BF16, LEVELS = ml_dtypes.bfloat16, ["portable", "avx2", "avx512"]
ACTIVATIONS = ["none", "relu", "relu6", "maximum0", "clip6"]
DTYPES = [np.float32, BF16, np.float16]
SHAPES = [
    (8, 56, 56, 64), (8, 7, 7, 2048), (2, 3, 5, 3), (16, 10), (1, 1, 1, 1), (3, 17), (2, 3, 2, 1000), (1000, 24), (3, 3, 2500),
    (5000, 1), (300, 136), (2, 4100),
]  # fmt: skip
EMPTY = [(0, 4, 4, 8), (3, 0), (0, 0)]
SMALL = [(2, 3, 5, 3), (37, 10), (40, 40), (9, 300)]


def rows_of(x):
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def random(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def vector(channels):
    return jax.ShapeDtypeStruct((channels,), jnp.float32)


def mask_type(x):
    return jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), -(-x.shape[-1] // 8)), jnp.uint8)


def run(target, out_types, *operands, **attrs):
    return list(ffi.call("jaxfuse_batch_norm_" + target, out_types, *operands, **attrs))


def stats(x):
    return run("stats", [vector(x.shape[-1])] * 2, x)


def apply(x, affine, residual=None, activation="none", save_mask=False):
    extra = () if residual is None else (residual,)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype), *[mask_type(x)] * save_mask]
    return run("apply", results, x, *affine, *extra, has_residual=bool(extra), save_mask=save_mask, **attributes(activation))


def backward(dy, x, mean, coefficients, slope_from=(), want_dresidual=True, **attrs):
    """[sum_g, sum_gx, dx, dresidual]"""
    full = jax.ShapeDtypeStruct(x.shape, x.dtype)
    attrs = dict(has_residual=len(slope_from) == 4) | attrs | attributes(attrs["activation"])
    sums = run("bwd_stats", [vector(x.shape[-1])] * 2, dy, x, mean, *slope_from, **attrs)
    results = [full] * (1 + want_dresidual)
    return sums + run("bwd_apply", results, dy, x, mean, *coefficients, *slope_from, want_dresidual=want_dresidual, **attrs)


def z_of(x, affine, residual=None):
    """With the kernel's own arithmetic: float32, every operation rounded, the sum rounded to x's dtype."""
    center, scale, offset = affine
    z = (x.astype(np.float32) - center) * scale + offset
    if residual is not None:
        z = z + residual.astype(np.float32)
    return z.astype(x.dtype).astype(np.float32)


def activated(z, activation):
    if activation == "none":
        return z
    return np.clip(z, 0, 6 if activation in ("relu6", "clip6") else None)


def slope(z, activation):
    if activation == "none":
        return np.ones_like(z)
    inside = (z > 0) & (z < 6) if activation in ("relu6", "clip6") else z > 0
    ties = dict(maximum0=z == 0, clip6=(z == 0) | (z == 6)).get(activation, False)
    return np.where(inside, 1, np.where(ties, 0.5, 0)).astype(np.float32)


def assert_statistics(x, rtol=1e-6):
    mean, var = stats(x)
    exact = rows_of(x).astype(np.float64)
    spread = exact.std(0)
    np.testing.assert_array_less(np.abs(mean - exact.mean(0)), 1e-6 * (spread + np.abs(exact.mean(0))) + 1e-30)
    np.testing.assert_allclose(var, exact.var(0), rtol=rtol, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stats(shape, dtype):
    assert_statistics(random(shape, dtype))


def test_stats_far_from_zero():
    assert_statistics(1e4 + random((8, 28, 28, 64)))
    assert_statistics(np.full((1000, 5), 1e4, np.float32))
    zeros_first = 1e4 + random((8, 28, 28, 16))
    zeros_first[0, 0, :9] = 0  # what a shift is taken from lies far from the rest
    assert_statistics(zeros_first, rtol=1e-5)
    outlier_first = random((5000, 3))
    outlier_first[0] = 1e6
    assert_statistics(outlier_first, rtol=1e-5)


@pytest.mark.parametrize("shape", [(700, 40), (2, 3)])
def test_stats_keep_nan_and_inf_in_their_channel(shape):
    x = random(shape)
    clean_mean, clean_var = stats(x)
    x[0, 0], x[-1, 1] = np.nan, np.inf
    mean, var = stats(x)
    assert np.isnan(mean[0]) and np.isnan(var[0])
    assert mean[1] == np.inf and np.isnan(var[1])
    np.testing.assert_array_equal(mean[2:], clean_mean[2:])
    np.testing.assert_array_equal(var[2:], clean_var[2:])
    x[0, 1] = -np.inf
    assert np.isnan(stats(x)[0][1])


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(shape):
    x, channels = np.zeros(shape, np.float32), shape[-1]
    v = np.ones(channels, np.float32)
    assert all(np.isnan(s).all() and s.shape == (channels,) for s in stats(x))
    y, mask = apply(x, (v, v, v), activation="relu", save_mask=True)
    assert y.shape == shape
    sum_g, sum_gx, dx, dresidual = backward(x, x, v, (v, v, v), (mask,), activation="relu", deriv="mask")
    assert not sum_g.any() and not sum_gx.any() and dx.shape == dresidual.shape == shape


def affine_for(channels):
    scale = random((channels,), seed=2)
    scale[:1] = 0  # z is the offset throughout
    return random((channels,), seed=1), scale, np.round(random((channels,), seed=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_apply(shape, has_residual, activation, dtype):
    x, affine = 3 * random(shape), affine_for(shape[-1])
    x = x.astype(dtype)
    x[..., 0].flat[:1] = np.nan
    x.flat[-1:] = np.inf
    residual = random(shape, dtype, 4) if has_residual else None
    z = z_of(x, affine, residual)
    save_mask = activation != "none"
    y, *mask = apply(x, affine, residual, activation, save_mask)
    np.testing.assert_array_equal(y.astype(np.float32), activated(z, activation))
    if save_mask:
        np.testing.assert_array_equal(mask[0], np.packbits(rows_of(slope(z, activation)) == 1, 1, "little"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_larger_than_the_caches(dtype):
    """Stores past the caches, aligned and not."""
    for channels in (1024, 1001):
        x = np.broadcast_to(random((channels,), dtype), ((36 << 20) // (channels * np.dtype(dtype).itemsize), channels))
        affine = affine_for(channels)
        (y,) = apply(x, affine, activation="relu")
        expected = activated(z_of(x[:1], affine), "relu").astype(dtype)
        assert (np.asarray(y).view(np.uint8) == expected.view(np.uint8)).all()


def derivatives(x, affine, activation, residual=None):
    """[(deriv, slope operands, act')] of z, which a mask knows too where a residual went in."""
    z = z_of(x, affine, residual)
    if activation == "none":
        return [("none", (), np.ones_like(z))]
    bits = np.packbits(rows_of(slope(z, activation)) == 1, 1, "little")
    found = [("mask", (bits,), (slope(z, activation) == 1).astype(np.float32))]
    return found if residual is not None else [*found, ("recompute", affine, slope(z, activation))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_backward(shape, activation, dtype):
    channels = shape[-1]
    x = np.round(4 * random(shape)).astype(dtype)  # z is an integer: ties at 0 and at 6 are common
    affine = np.zeros(channels, np.float32), np.ones(channels, np.float32), np.round(random((channels,), seed=3))
    dy, mean = random(shape, dtype, 4), random((channels,), seed=5)
    a, b, c = (random((channels,), seed=seed) for seed in (6, 7, 8))
    for deriv, slope_from, factor in derivatives(x, affine, activation):
        g = dy.astype(np.float32) * factor
        centered = x.astype(np.float32) - mean
        sum_g, sum_gx, dx, dresidual = backward(dy, x, mean, (a, b, c), slope_from, activation=activation, deriv=deriv)
        for total, terms in ((sum_g, g), (sum_gx, g.astype(np.float64) * centered)):
            terms = rows_of(terms).astype(np.float64)
            np.testing.assert_allclose(total, terms.sum(0), rtol=1e-6, atol=1e-6 * np.abs(terms).sum(0).max())
        np.testing.assert_array_equal(dx, (a * g + b * centered + c).astype(dtype))
        np.testing.assert_array_equal(dresidual, g.astype(dtype))


@pytest.mark.parametrize("shape", [(8, 56, 56, 64), (8, 7, 7, 2048), (5000, 1)], ids=str)
def test_backward_of_large_arrays(shape):
    x, dy, channels = random(shape), random(shape, seed=1), shape[-1]
    mean, affine = np.zeros(channels, np.float32), affine_for(channels)
    for deriv, slope_from, factor in derivatives(x, affine, "relu"):
        g = (dy * factor).astype(np.float64)
        sum_g, sum_gx, dx = backward(dy, x, mean, (affine[1],) * 3, slope_from, False, activation="relu", deriv=deriv)
        np.testing.assert_allclose(sum_g, rows_of(g).sum(0), atol=2e-7 * rows_of(abs(g)).sum(0).max())
        np.testing.assert_allclose(sum_gx, rows_of(g * x).sum(0), atol=2e-7 * rows_of(abs(g * x)).sum(0).max())
        np.testing.assert_array_equal(dx, affine[1] * (dy * factor) + affine[1] * x + affine[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_gradients(dtype):
    """A NaN z passes no gradient, a NaN dy does where act' is not 0."""
    x = np.array([[np.nan, 1, -1]], dtype)
    dy = np.array([[1, np.nan, np.nan]], dtype)
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    for deriv, slope_from, _ in derivatives(x, (zero, one, zero), "relu"):
        *_, dresidual = backward(dy, x, zero, (one, zero, zero), slope_from, activation="relu", deriv=deriv)
        np.testing.assert_array_equal(dresidual.astype(np.float32), [[0, np.nan, 0]])


@pytest.mark.parametrize("activation, value", [
    ("relu", jax.nn.relu), ("relu6", jax.nn.relu6), ("maximum0", lambda z: jnp.maximum(z, 0)),
    ("clip6", lambda z: jnp.minimum(jnp.maximum(z, 0), 6))])
def test_derivative_is_jaxs_own(activation, value):
    z = np.array([[-1, 0, 1, 6, 7, np.nan, np.inf, -np.inf]], np.float32)
    zero, one, how = np.zeros(8, np.float32), np.ones(8, np.float32), dict(activation=activation, deriv="recompute")
    *_, dresidual = backward(np.ones_like(z), z, zero, (one, zero, zero), (zero, one, zero), **how)
    np.testing.assert_array_equal(dresidual, jax.vmap(jax.vmap(jax.grad(value)))(z))


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_mask_and_recomputed_sign_agree(dtype):
    x, affine = random((4000, 48), dtype), affine_for(48)
    y, mask = apply(x, affine, activation="relu", save_mask=True)
    ones, v = np.ones(x.shape, dtype), np.zeros(48, np.float32)
    *_, from_mask = backward(ones, x, v, (v, v, v), (mask,), activation="relu", deriv="mask")
    *_, recomputed = backward(ones, x, v, (v, v, v), affine, activation="relu", deriv="recompute")
    np.testing.assert_array_equal(from_mask, (y > 0).astype(dtype))
    np.testing.assert_array_equal(recomputed, from_mask)


@jax.jit
def all_targets(x, dy, *affine):
    forward = stats(x) + apply(x, affine, dy, "relu", save_mask=True)
    recomputed = backward(dy, x, affine[0], affine, affine, activation="clip6", deriv="recompute")
    return forward + recomputed + backward(dy, x, affine[0], affine, activation="none", deriv="none")


def digest():
    """Of all results on a few shapes."""
    found = hashlib.sha256()
    for shape in [(8, 14, 14, 256), (8, 7, 7, 2048), (1000, 24), (77, 3), (20, 300)]:
        for dtype in DTYPES:
            for result in all_targets(random(shape, dtype), random(shape, dtype, 1), *affine_for(shape[-1])):
                found.update(np.asarray(result).tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def own_digest():
    return digest()


@pytest.mark.parametrize("simd, threads", [("portable", 2), ("avx2", 1), ("avx512", 3)])
def test_bits_do_not_depend_on_isa_or_threads(own_digest, simd, threads):
    if ffi.native().info()["simd"] in LEVELS[: LEVELS.index(simd)]:
        pytest.skip(f"this machine has no {simd}")
    done = python(__file__, JAXFUSE_SIMD=simd, OMP_NUM_THREADS=str(threads))
    assert done.stdout.split() == [simd, own_digest], done.stderr


def test_unknown_simd_level_is_refused():
    done = python(__file__, JAXFUSE_SIMD="mmx")
    assert done.returncode != 0
    assert 'JAXFUSE_SIMD is "mmx", expected portable, avx2, avx512 or avx512_amx' in done.stderr


def test_concurrent_calls_repeat_to_the_bit(own_digest):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert {future.result() for future in [pool.submit(digest) for _ in range(4)]} == {own_digest}


X = np.zeros((4, 6), np.float32)
V = np.zeros(6, np.float32)
FULL, MASK = jax.ShapeDtypeStruct((4, 6), np.float32), jax.ShapeDtypeStruct((4, 1), np.uint8)
APPLY = attributes("relu") | dict(has_residual=False, save_mask=False)
BACKWARD = attributes("relu") | dict(deriv="mask", has_residual=False)
RECOMPUTE = BACKWARD | {"deriv": "recompute"}


@pytest.mark.parametrize(
    "target, out_types, operands, attrs, sentence",
    [
        ("stats", [vector(6)] * 2, [X.astype(np.int32)], {}, "x has dtype int32, expected float32 or bfloat16 or float16"),
        ("stats", [vector(6)] * 2, [V], {}, r"x has shape \(6,\), expected at least 2 dimensions"),
        ("stats", [vector(6), vector(5)], [X], {}, r"var has shape \(5,\), expected \(6,\)"),
        ("stats", [vector(6)], [X], {}, "got 1 results, expected 2"),
        ("apply", [FULL], [X, V, V], APPLY, "got 3 operands, expected 4"),
        ("apply", [FULL], [X, V[:5], V, V], APPLY, r"center has shape \(5,\), expected \(6,\)"),
        ("apply", [FULL], [X, V, V, V.astype(BF16)], APPLY, "offset has dtype bfloat16, expected float32"),
        ("apply", [FULL], [X, V, V, V, X[:2]], APPLY | {"has_residual": True}, r"residual has shape \(2, 6\), expected"),
        ("apply", [FULL, FULL], [X, V, V, V], APPLY | {"save_mask": True}, "mask has dtype float32, expected uint8"),
        ("apply", [FULL], [X, V, V, V], APPLY | {"activation": "sine"}, 'activation is "sine", expected one of'),
        ("apply", [FULL, MASK], [X, V, V, V], APPLY | {"activation": "gelu", "save_mask": True}, "activation gelu is no mask"),
        ("bwd_stats", [vector(6)] * 2, [X, X, *[V] * 4], RECOMPUTE | {"has_residual": True}, "got 6 operands, expected 7"),
        ("apply", [FULL], [X, V, V, V], attributes("relu") | {"has_residual": False}, "attribute save_mask is missing"),
        ("apply", [FULL, MASK], [X, V, V, V], APPLY | {"activation": "none", "save_mask": True}, "activation none is no mask"),
        ("bwd_stats", [vector(6)] * 2, [X, X, V], BACKWARD, "got 3 operands, expected 4"),
        ("bwd_stats", [vector(6)] * 2, [X, X, V], BACKWARD | {"deriv": "none"}, "contradict each other"),
        ("bwd_stats", [vector(6)] * 2, [X, X, V], BACKWARD | {"deriv": "guess"}, 'deriv is "guess", expected none'),
        ("bwd_stats", [vector(6)] * 2, [X, X.astype(BF16), V, X[:, :1].astype(np.uint8)], BACKWARD, "dy has dtype float32"),
        ("bwd_apply", [FULL], [X, X, V, V, V, V, X.astype(np.uint8)], BACKWARD | {"want_dresidual": False},
         r"mask has shape \(4, 6\), expected \(4, 1\)"),
    ],
)  # fmt: skip
def test_arguments_are_checked(target, out_types, operands, attrs, sentence):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*jaxfuse_batch_norm_{target}: .*{sentence}"):
        run(target, out_types, *operands, **attrs)


if __name__ == "__main__":
    print(ffi.native().info()["simd"], digest())
