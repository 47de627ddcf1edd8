"""Side effects of a fused program: what is written to a reference, what the host is told, in the order of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from layers import Z
from recognition import fuse, patterns


def normalised(x, scale):
    return jax.nn.relu((x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * scale + 1)


def test_a_reference_that_is_written_before_it_is_read():
    def function(x, reference):
        reference[...] = x.mean((0, 1, 2))
        return normalised(x, reference[...])

    plain, fused = (wrap(function)(Z, jax.new_ref(jnp.full(8, 5.0))) for wrap in (jax.jit, fuse))
    np.testing.assert_allclose(fused, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 2])
def test_callbacks_in_order(steps):
    told = []

    def scale():
        told.append("asked")
        return np.full(8, 2, np.float32)

    def function(x):
        io_callback(lambda mean: told.append("told"), None, x.mean((0, 1, 2)), ordered=True)
        return normalised(x, io_callback(scale, jax.ShapeDtypeStruct((8,), jnp.float32), ordered=True))

    made = fuse(lambda x: lax.fori_loop(0, steps, lambda i, x: function(x), x))(Z)
    jax.block_until_ready(made)
    jax.effects_barrier()
    assert told == ["told", "asked"] * steps


def test_what_no_later_effect_gives_is_fused():
    def function(x, reference):
        y = normalised(x, 1)
        reference[...] = y.mean((0, 1, 2))
        return y + reference[...]

    assert patterns(function, Z, jax.new_ref(jnp.zeros(8)))[0] == ["bn+relu"]
