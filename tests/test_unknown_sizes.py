"""Symbolic shapes: no number of a program, and no other size, is taken for a size that is not known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from compare import distance


def exported(function, *args):
    return jax.export.export(jax.jit(function))(*args)


def normalised(x, count, of_variance=None):
    """By sums over images that are divided by these numbers."""
    mean = x.sum((0, 1, 2)) / count
    var = ((x - mean) ** 2).sum((0, 1, 2)) / (count if of_variance is None else of_variance)
    return (x - mean) * lax.rsqrt(var + 1e-5)


UNKNOWN = {  # of x[b, h, w, 8] and y[c, 3]: whatever stands for b while patterns are looked for is no number of the program
    "a number": lambda x, y: normalised(x, 80),
    "that of BATCH": lambda x, y: normalised(x, 16 * 32),
    "another size": lambda x, y: normalised(x, 16 * y.shape[0]),
    "one less": lambda x, y: normalised(x, x.size // 8, x.size // 8 - 1),
    "variance of samples": lambda x, y: (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2), ddof=1) + 1e-5),
    "at least": lambda x, y: normalised(x, jnp.maximum(16 * x.shape[0], 100)),
    "one of two": lambda x, y: normalised(x, (lambda n: jnp.where(n > 64, n, 64.0))(jnp.float32(16 * x.shape[0]))),
    "half of the places": lambda x, y: normalised(x, x.shape[0] * x.shape[1] * (x.shape[2] // 2 + 1)),
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("sizes", ["b, 4, 4", "b, 32, 32", "b, h, w"])
def test_a_number_is_not_the_unknown_batch(name, sizes):
    function, shape = UNKNOWN[name], jax.export.symbolic_shape(f"{sizes}, 8, c")
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape[:4], (shape[4], 3))]
    program, rng = exported(jaxfuse.fuse(function, policy="always"), *types), np.random.default_rng(0)
    for unknown in (dict(b=1, h=6, w=6, c=7), dict(b=5, h=4, w=3, c=2)):
        x, y = (0.5 + rng.normal(size=[unknown.get(str(n), n) for n in t.shape]).astype("float32") for t in types)
        assert distance(program.call(x, y), jax.jit(function)(x, y)) < 1e-5
