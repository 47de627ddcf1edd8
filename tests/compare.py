"""How results are compared, and with what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


# Compiles in half the time; what runs is tiny.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def value_and_gradients(function, arrays, cotangents):
    """The outputs of `function(arrays)` and the gradients of all `arrays`."""
    outs, vjp = jax.vjp(function, arrays)
    return outs, vjp(tuple(cotangents))[0]


@functools.cache
def unfused(case):
    return jit(lambda arrays, cotangents: value_and_gradients(case.unfused, arrays, cotangents))


@functools.cache
def by_xla(case, dtype):
    """What `unfused(case)` returns for the case's inputs of that dtype, and what it returns for them in float64."""
    args = with_cotangents(case, case.inputs(dtype))
    with jax.enable_x64(True):
        exact = unfused(case)(*as_float64(args))
    return unfused(case)(*args), exact


def with_cotangents(case, arrays):
    outs = jax.eval_shape(case.unfused, arrays)
    rng = np.random.default_rng(1)
    return arrays, tuple(jnp.asarray(rng.normal(size=out.shape), out.dtype) for out in outs)


def as_float64(tree):
    """Call under `jax.enable_x64`. No kernel takes float64, so nothing that is done with it is native."""
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), tree)


def pairs(*trees):
    assert len(set(map(jax.tree.structure, trees))) == 1
    return zip(*map(jax.tree.leaves, trees), strict=True)


def distance(value, exact):
    """Root mean square error, relative to the root mean square of `exact`."""
    assert value.shape == exact.shape
    value, exact = np.asarray(value, np.float64), np.asarray(exact, np.float64)
    return np.sqrt(np.mean((value - exact) ** 2) / (np.mean(exact**2) + 1e-30))
