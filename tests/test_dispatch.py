"""A fused program is dispatched as an unfused one: XLA hands it to a thread of its own where it is worth it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from jaxfuse.runtime import dispatch

pytestmark = pytest.mark.usefixtures("some_kernel")
W = 0.1 * jax.random.normal(jax.random.key(1), (3, 3, 32, 32))


def network(x):
    for _ in range(3):
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, W.astype(x.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return x


def test_returns_before_the_result_is_there():
    fused, x = jaxfuse.fuse(network, policy="always"), jnp.ones((8, 112, 112, 32))
    jax.block_until_ready(fused(x))
    early = []
    for _ in range(10):
        y = fused(x)
        early.append(not y.is_ready())
        y.block_until_ready()
    assert any(early)


@pytest.mark.parametrize("least, counted", [(1, True), (1 << 60, False)])
def test_what_xla_counts(least, counted, monkeypatch):
    """In place: nothing is copied for it."""
    monkeypatch.setattr(dispatch, "WORTH_A_THREAD", least)
    compiled = jaxfuse.fuse(network, policy="always").lower(jnp.ones((1, 8, 8, 32))).compile()
    assert (compiled.cost_analysis()["flops"] > 1000) == counted
    assert " copy(" not in compiled.as_text()


def reshaped_norm(x):
    y = jaxfuse.ops.layer_norm(x, jnp.ones(32), jnp.zeros(32))
    return y.reshape(-1, 64)


def reshaped_dense(x):
    return jaxfuse.ops.dense(x, W[0, 0], jnp.arange(32.0)).reshape(-1, 64)


@pytest.mark.parametrize("program", [reshaped_norm, reshaped_dense])
def test_nothing_large_is_copied_where_a_reshape_follows(program):
    """XLA makes one loop of a reshape and what changes an element, which is not in place."""
    compiled = jax.jit(program).lower(jnp.ones((64, 128, 32))).compile()
    assert compiled.cost_analysis()["flops"] > 1000
    lines = compiled.as_text().splitlines()
    assert not [line for line in lines if "copy" in line and "f32[64,128,32]" in line]
    assert not [line for line in lines if "fusion(" in line and "f32[4096,64]" in line]


@pytest.mark.parametrize("source", [None, jnp.full((2, 2), 3.5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "uint8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_same_bits(dtype, shape, source):
    x, through = jnp.zeros(shape, dtype), jax.jit(lambda x, other: dispatch._first_from(x, x if source is None else other))
    for first in (1, -0.0, np.nan, np.inf, 7e-6) if dtype != "uint8" else (0, 1, 255):
        given = x.at[(0,) * len(shape)].set(first)
        assert np.asarray(through(given, source)).tobytes() == np.asarray(given).tobytes()
