"""A layer of a frozen network that is written over its residual, which nothing reads afterwards: less memory is touched."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import jaxfuse
from compare import kinds, same
from jaxfuse.runtime import ffi

pytestmark = pytest.mark.skipif(ffi.unavailable("jaxfuse_conv_packed") is not None, reason="the native module is not built")
NEAR = {jnp.float32: dict(times=3), jnp.bfloat16: dict(times=3, floor=0.01)}


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def frozen(function, dtype=jnp.float32, side=1, channels=40, image=(9, 7)):
    """(the function frozen, the function itself, x and r, how many layers are written over their residual), of a filter of channels
    by channels. XLA has copied nothing for them."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = (jax.random.normal(keys[0], (side, side, channels, channels)) / (side * channels**0.5)).astype(dtype)
    x, r = (jax.random.normal(key, (2, *image, channels)).astype(dtype) for key in keys[1:])
    made = jaxfuse.freeze(function, w, policy="always")
    program = jax.jit(made).lower(x, r).compile().as_text()
    assert not re.search(r"= \S+ copy\(|bitcast_copy_fusion = ", program[program.index("ENTRY") :])
    return made, functools.partial(function, w), (x, r), program.count("output_to_operand_aliasing")


def norm(x):
    return nn.LayerNorm(dtype=x.dtype).apply({"params": {"scale": jnp.ones(x.shape[-1]), "bias": jnp.zeros(x.shape[-1])}}, x)


OVERWRITTEN = {
    "computed before": lambda w, x, r: jax.nn.relu(conv(x, w) + jnp.tanh(r)),
    "read before": lambda w, x, r: conv(jnp.sin(z := jnp.tanh(r)), w) + z,
    "activation in a pass of its own": lambda w, x, r: jax.nn.gelu(conv(x, w) + jnp.tanh(r)),
    "after the activation": lambda w, x, r: jax.nn.silu(conv(x, w)) + jnp.tanh(r),
    "rows of a dense layer": lambda w, x, r: x @ w[0, 0] + jnp.tanh(r),
    "rows of a sequence": lambda w, x, r: ((z := norm(r[:, 0])) @ w[0, 0]) @ w[0, 0].T + z,
    "behind a gate": lambda w, x, r: conv(x * jax.nn.sigmoid(x.mean((1, 2), keepdims=True)), w) + jnp.tanh(r),
}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", OVERWRITTEN)
def test_a_residual_that_ends_here(name, dtype):
    made, plain, args, count = frozen(OVERWRITTEN[name], dtype)
    assert count == 1
    for _ in range(2):
        same(jax.jit(made)(*args), plain(*args), **NEAR[dtype])
    same(jax.vmap(made)(*(a[:, None] for a in args))[:, 0], plain(*args), **NEAR[dtype])


def test_sums_in_several_parts():
    """y holds the first of them while there are more to come."""
    made, plain, args, count = frozen(OVERWRITTEN["behind a gate"], channels=300, image=(20, 20))
    assert count == 1
    same(jax.jit(made)(*args), plain(*args), times=3)


LEFT = {
    "an argument": lambda w, x, r: conv(x, w) + r,
    "returned": lambda w, x, r: (conv(x, w) + (z := jnp.tanh(r)), z),
    "returned in another shape": lambda w, x, r: (conv(x, w) + (z := jnp.tanh(r)), z.reshape(-1)),
    "read behind": lambda w, x, r: jnp.sum(z := jnp.tanh(r), 0) * jnp.sin(conv(x, w) + z) * z,
    "what the layer multiplies": lambda w, x, r: conv(z := jnp.tanh(r), w) + z,
    "computed in another shape": lambda w, x, r: conv(x, w) + norm(r.reshape(2, 63, -1)).reshape(r.shape),
    "rows of a matrix": lambda w, x, r: ((z := norm(r[:, 0, 0])) @ w[0, 0]) @ w[0, 0].T + z,
    "the same in another shape": lambda w, x, r: conv(z := jnp.tanh(r), w) + z.reshape(2, -1).reshape(z.shape),
    "what a gate multiplies": lambda w, x, r: conv((z := jnp.tanh(r)) * jax.nn.sigmoid(x.mean((1, 2), keepdims=True)), w) + z,
}


@pytest.mark.parametrize("name", LEFT)
def test_a_residual_that_is_read_afterwards(name):
    made, plain, args, count = frozen(LEFT[name])
    assert count == 0
    same(jax.jit(made)(*args), plain(*args), times=3)


def test_winograd_keeps_the_residual():
    """What it finds to be infinite is computed once more, with the residual."""
    made, plain, args, count = frozen(OVERWRITTEN["computed before"], side=3)
    assert count == 0 and any(name.startswith("transformed") for name in made._constants)
    same(jax.jit(made)(*args), plain(*args), times=3)
    x = args[0].at[0, 3, 3, 5].set(jnp.inf)
    np.testing.assert_array_equal(kinds(jax.jit(made)(x, args[1])), kinds(plain(x, args[1])))


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("side, image", [(1, (9, 7)), (1, (3, 3)), (3, (9, 7))])
def test_in_int8(side, image, dtype):
    """The same bits as of one that is kept."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (side, side, 40, 40)).astype(dtype)
    x, r = (jax.random.normal(key, (2, *image, 40)).astype(dtype) for key in keys[1:])
    given, computed = (lambda w, x, r: jax.nn.relu(conv(x, w) + r)), (lambda w, x, r: jax.nn.relu(conv(x, w) + jnp.abs(r)))
    kept, over = (jax.jit(jaxfuse.freeze(f, w, policy="always", int8=[(x, r)], int8_error=1.0)) for f in (given, computed))
    programs = [f.lower(x, r).compile().as_text() for f in (kept, over)]
    assert [program.count("output_to_operand_aliasing") for program in programs] == [0, 1]
    assert all("jaxfuse_conv_int8" in program for program in programs)
    np.testing.assert_array_equal(over(x, r), kept(x, jnp.abs(r)))


def test_a_saved_program(tmp_path):
    made, plain, args, _ = frozen(OVERWRITTEN["computed before"])
    made.save(tmp_path / "layer", *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    same(jaxfuse.load(tmp_path / "layer")(*args), plain(*args), times=3)
