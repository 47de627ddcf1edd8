"""global_average_pool: its target, its errors, and what reports and strict mode say where it is left to XLA. Hits and near-misses are in
spellings/, the contract of the op in test_ops.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from jaxfuse import ops
from jaxfuse.runtime import ffi
from jaxfuse.runtime.reasons import LeftToXla
from layers import randn

TARGET = "jaxfuse_global_average_pool"
needs_native = pytest.mark.skipif(ffi.unavailable(TARGET) is not None, reason=str(ffi.unavailable(TARGET)))


def pooled(shape, x):
    return ffi.call(TARGET, jax.ShapeDtypeStruct(shape, jnp.float32), x)


@needs_native
@pytest.mark.parametrize("shape", [(1, 9000, 3), (2, 130, 130, 1), (3, 1, 40000), (1, 2, 2, 2, 2, 17), (7, 33, 31, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_as_near_to_the_truth_as_float32_is(shape, dtype):
    x = 3 + randn(*shape).astype(dtype)
    truth = np.asarray(x, np.float64).mean(tuple(range(1, x.ndim - 1)))
    np.testing.assert_allclose(pooled(truth.shape, x), truth, rtol=3e-7, atol=1e-7)


@needs_native
@pytest.mark.parametrize("x, shape, words", [
    (jnp.ones((2, 3, 4)), (2, 5), r"y has shape \(2, 5\), expected the first dimensions and the last of x, \(2, 3, 4\)"),
    (jnp.ones((2, 3, 4)), (3, 4), "expected the first dimensions"),
    (jnp.ones((2, 3, 4)), (2, 3, 4), "expected the first dimensions"),
    (jnp.ones((2, 0, 4)), (2, 4), r"x has shape \(2, 0, 4\), expected no empty dimension"),
    (jnp.ones((2, 3, 4), jnp.int32), (2, 4), "x has dtype"),
])
def test_the_target_refuses_in_words(x, shape, words):
    with pytest.raises(Exception, match=words):
        pooled(shape, x).block_until_ready()


@pytest.mark.parametrize("x, words", [(jnp.ones((2, 3)), "of rank 2.*rank 3 or more"), (jnp.ones((2, 3, 4), int), "a float dtype")])
def test_errors_in_words(x, words):
    with pytest.raises(ops.OpError, match=words):
        ops.global_average_pool(x)


def test_an_empty_image_is_left_to_xla():
    x = jnp.ones((2, 0, 4))
    assert np.isnan(ops.global_average_pool(x)).all() and ops.global_average_pool(x[:0]).shape == (0, 4)


@needs_native
def test_strict_mode_lets_what_xla_does_as_fast_pass():
    """Where the rules have it so: in float32, small."""
    function, x = lambda x: x.mean((1, 2)), randn(1, 14, 14, 16)
    (site,) = jaxfuse.explain(function, x).skipped
    assert site.pattern == "global_average_pool" and isinstance(site.reason, LeftToXla)
    jaxfuse.fuse(function, strict=True)(x)
