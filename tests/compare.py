"""How results are compared, and with what: one rule of tolerance for each type of number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from arrays import array

# Root mean square of what the roundings of a result's own type may do to it, relative to its size.
ROUNDING = dict(float64=1e-12, float32=1e-6, bfloat16=2e-3, float16=3e-4)

# Compiles in half the time; what runs is tiny.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def as_near_to_the_truth(made, plain, exact, *, narrowest=None, times=1.0):
    """No array of `made` is further from `exact` than half as far again as the one of `plain`, and a rounding.

    `narrowest`: the type that a program computes in where that is narrower than what it returns.
    """
    for path, value, unfused_value, true in leaves(made, plain, exact):
        assert value.dtype == unfused_value.dtype, path
        rounding = max(ROUNDING[jnp.dtype(dtype).name] for dtype in (value.dtype, narrowest or value.dtype))
        error, allowed = distance(value, true), 1.5 * distance(unfused_value, true) + times * rounding
        assert error <= allowed, f"{path}: off by {error:.2g}, allowed {allowed:.2g}"


def same(made, plain, *, narrowest=None, times=1.0, floor=0.0):
    """Two computations of the same numbers: each array within twice a rounding of the other.

    `floor`: the part of the largest array's size that counts as an array's own size at least, where what is summed cancels.
    """
    pairs_of = list(leaves(made, plain))
    largest = max((size(known) for *_, known in pairs_of), default=0)
    for path, value, known in pairs_of:
        assert value.dtype == known.dtype, path
        rounding = max(ROUNDING[jnp.dtype(dtype).name] for dtype in (value.dtype, narrowest or value.dtype))
        error, allowed = distance(value, known, floor * largest), 2 * times * rounding
        assert error <= allowed, f"{path}: off by {error:.2g}, allowed {allowed:.2g}"


def leaves(first, *others):
    """(path, leaf of each) of trees of one structure; integers and the like have to be equal, and are left out."""
    paths, structure = jax.tree_util.tree_flatten_with_path(first)
    assert all(jax.tree.structure(other) == structure for other in others)
    for (path, leaf), *rest in zip(paths, *map(jax.tree.leaves, others), strict=True):
        if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            yield jax.tree_util.keystr(path), jnp.asarray(leaf), *rest
        else:
            for other in rest:
                np.testing.assert_array_equal(leaf, other)


def value_and_gradients(function, arrays, cotangents):
    """The outputs of `function(arrays)` and the gradients of all `arrays`."""
    outs, vjp = jax.vjp(function, arrays)
    return outs, vjp(tuple(cotangents))[0]


def forward_and_gradients(function):
    """Of one argument, by all the arrays in it."""
    return lambda arrays: (function(arrays), jax.grad(lambda a: sum(jnp.sum(jnp.sin(out)) for out in function(a)))(arrays))


def fused(case):
    """Made anew each time: the kernel is chosen when it is compiled."""
    return jit(lambda arrays, cotangents: value_and_gradients(case.fused, arrays, cotangents))


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
    return arrays, tuple(array(rng.normal(size=out.shape), out.dtype) for out in outs)


def as_float64(tree):
    """Call under `jax.enable_x64`. No kernel takes float64, so nothing that is done with it is native."""
    return jax.tree.map(lambda a: array(a, np.float64), tree)


def pairs(*trees):
    assert len(set(map(jax.tree.structure, trees))) == 1
    return zip(*map(jax.tree.leaves, trees), strict=True)


def kinds(array):
    """0: finite, 1: inf, 2: -inf, 3: NaN."""
    array = np.asarray(array, np.float64)
    return np.select([np.isnan(array), np.isposinf(array), np.isneginf(array)], [3, 1, 2], 0)


def size(array):
    """Root mean square."""
    array = np.asarray(array, np.float64)
    return np.sqrt(np.mean(array**2)) if array.size else 0.0


def distance(value, exact, least=0.0):
    """Root mean square error, relative to the root mean square of `exact`, or to `least` where that is more. What is not finite has
    to be the same."""
    assert value.shape == exact.shape
    value, exact = np.asarray(value, np.float64), np.asarray(exact, np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(value[~finite], exact[~finite])
    return size((value - exact)[finite]) / max(size(exact[finite]), least, 1e-15)
