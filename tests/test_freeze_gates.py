"""Factors of channels, as squeeze-and-excitation has them, that `jaxfuse.freeze` takes into the layer behind."""

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from compare import same
from layers import variables_of
from packed_programs import counts

pytestmark = pytest.mark.usefixtures("some_kernel")


class Excited(nn.Module):
    """An inverted residual's second half."""

    dtype: jnp.dtype = jnp.float32
    kernel: tuple = (1, 1)

    @nn.compact
    def __call__(self, x):
        h = nn.silu(nn.Conv(48, (1, 1), dtype=self.dtype)(x))
        g = nn.silu(nn.Conv(6, (1, 1), dtype=self.dtype)(h.mean((1, 2), keepdims=True)))
        g = nn.sigmoid(nn.Conv(48, (1, 1), dtype=self.dtype)(g))
        return nn.Conv(32, self.kernel, dtype=self.dtype)(h * g) + x


@pytest.fixture
def gates(monkeypatch):
    """How many gates each program that is made has."""
    return counts(monkeypatch, "_gates")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gate_is_taken_in(dtype, batch, gates):
    """What vmap, autodiff and a fuse around it need is multiplied again."""
    model, x = Excited(dtype), jax.random.normal(jax.random.key(0), (batch, 7, 7, 32), dtype)
    variables = variables_of(model, x)
    made = jaxfuse.freeze(model.apply, variables, policy="always")
    near = dict(times=3) if dtype == jnp.float32 else dict(times=3, floor=0.02)
    wanted = model.apply(variables, x)
    same(made(x), wanted, **near)
    assert gates == [1]
    same(jax.vmap(made)(x[:, None])[:, 0], wanted, **near)
    same(jax.grad(lambda x: made(x).astype(jnp.float32).sum())(x),
         jax.grad(lambda x: model.apply(variables, x).astype(jnp.float32).sum())(x), times=10, floor=0.02)
    same(jaxfuse.fuse(lambda x: made(x) + 1)(x), wanted + 1, **near)


def test_a_gate_before_taps(gates):
    model, x = Excited(kernel=(3, 3)), jax.random.normal(jax.random.key(0), (2, 5, 5, 32))
    variables = variables_of(model, x)
    same(jaxfuse.freeze(model.apply, variables)(x), model.apply(variables, x), times=3)
    assert len(gates) == 1


def test_a_gate_in_a_file(tmp_path):
    model, x = Excited(), jax.random.normal(jax.random.key(0), (2, 7, 7, 32))
    variables = variables_of(model, x)
    jaxfuse.freeze(model.apply, variables, policy="always").save(tmp_path / "net.jaxfuse", x)
    same(jaxfuse.load(tmp_path / "net.jaxfuse")(x), model.apply(variables, x), times=3)


@pytest.mark.parametrize("policy", ["always", "measured"])
def test_a_gate_in_a_file_for_any_batch(policy, gates, tmp_path):
    model, x = Excited(), jax.random.normal(jax.random.key(0), (3, 7, 7, 32))
    variables = variables_of(model, x)
    any_batch = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), *x.shape[1:]), x.dtype)
    jaxfuse.freeze(model.apply, variables, policy=policy).save(tmp_path / "net.jaxfuse", any_batch)
    assert len(gates) == 1 or policy == "measured"
    for images in (x, x[:1]):
        same(jaxfuse.load(tmp_path / "net.jaxfuse")(images), model.apply(variables, images), times=3)


@pytest.mark.parametrize("size", [4, 9])
def test_nan_and_infinity_of_a_gate(size):
    """A factor of 0 by an infinity is NaN for that channel, and so for that image, no other. Of many pixels the filter is multiplied."""
    w = jax.random.normal(jax.random.key(1), (1, 1, 16, 32))
    made = jaxfuse.freeze(gated, w, policy="always")
    x = jnp.ones((2, size, size, 16)).at[0, 1, 2, 3].set(jnp.inf)
    factors = jnp.ones((2, 1, 1, 16)).at[0, 0, 0, 3].set(0)
    np.testing.assert_array_equal(np.isnan(made(x, factors)), np.isnan(gated(w, x, factors)))
    assert np.isnan(made(x, factors)).any() and not np.isnan(made(x, factors)[1]).any()
    for value in (jnp.nan, jnp.inf):
        factors = jnp.ones((2, 1, 1, 16)).at[1, 0, 0, 5].set(value)
        found, wanted = np.asarray(made(x, factors)), np.asarray(gated(w, x, factors))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))


@pytest.mark.parametrize("channels, features", [(20, 70), (300, 40), (513, 33), (300, 100)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_of_any_length(channels, features, dtype, gates):
    """With a residual and a clip behind; of one image and of several."""
    keys = jax.random.split(jax.random.key(2), 4)
    w = (jax.random.normal(keys[0], (1, 1, channels, features)) / np.sqrt(channels)).astype(dtype)
    made = jaxfuse.freeze(lambda w, x, factors, r: jax.nn.relu6(gated(w, x, factors) + r), w, policy="always")
    for images in (1, 3):
        x, r = (jax.random.normal(key, (images, 9, 8, n)).astype(dtype) for key, n in zip(keys[1:], (channels, features)))
        factors = jax.nn.sigmoid(jax.random.normal(keys[3], (images, 1, 1, channels))).astype(dtype)
        same(made(x, factors, r), jax.nn.relu6(gated(w, x, factors) + r), times=3, floor=0.02 * (dtype != jnp.float32))
    assert gates == [1, 1]


def convolved(w, x):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def gated(w, x, factors):
    return convolved(w, x * factors)


def written_out(w, x, factors):
    return convolved(w, jnp.broadcast_to(factors, x.shape) * x)


@pytest.mark.parametrize("program", [gated, written_out])
def test_spellings_of_a_gate(program, gates):
    check(program, (2, 1, 1, 16), gates, 1)


NEAR_MISSES = {
    "a factor of each pixel": (gated, (2, 4, 4, 1)),
    "of each number": (gated, (2, 4, 4, 16)),
    "of each channel of all images": (gated, (1, 1, 1, 16)),
    "of each image": (gated, (2, 1, 1, 1)),
    "a sum": (lambda w, x, factors: convolved(w, x + factors), (2, 1, 1, 16)),
    "the product is read again": (lambda w, x, factors: convolved(w, x * factors) + (x * factors).sum(), (2, 1, 1, 16)),
    "the product is returned": (lambda w, x, factors: (convolved(w, x * factors), x * factors), (2, 1, 1, 16)),
}


@pytest.mark.parametrize("program, shape", NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_what_is_no_gate(program, shape, gates):
    check(program, shape, gates, 0)


def check(program, shape, gates, expected):
    w = jax.random.normal(jax.random.key(1), (1, 1, 16, 32))
    x, factors = jax.random.normal(jax.random.key(2), (2, 4, 4, 16)), jax.random.uniform(jax.random.key(3), shape)
    found, wanted = jaxfuse.freeze(program, w, policy="always")(x, factors), program(w, x, factors)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        same(a, b, times=3)
    assert gates == [expected]
