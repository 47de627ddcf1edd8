"""JAX's switches, for every op called directly and for every op found by `fuse`: the program says what it says without them."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jaxfuse
from cases import CASES, CORE
from compare import distance, forward_and_gradients, pairs

EACH = {CASES[name].op: CASES[name] for name in reversed(CORE)}  # one case of each op


@contextlib.contextmanager
def no_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


SWITCHES = {
    "disable_jit": lambda: jax.disable_jit(),
    "debug_nans": lambda: jax.debug_nans(True),
    "no promotion": no_promotion,
}


def traced(function, arrays):
    """As one program that promotes nothing: what is promoted in the user's own lines is no concern of ours."""
    closed, tree = jax.make_jaxpr(function, return_shape=True)(arrays)
    return lambda arrays: jax.tree.unflatten(jax.tree.structure(tree), jaxpr_as_fun(closed)(*jax.tree.leaves(arrays)))


@functools.cache
def without(op):
    """The case's program, and what it gives without a switch."""
    function = forward_and_gradients(EACH[op].unfused)
    return traced(function, EACH[op].inputs()), jax.jit(function)(EACH[op].inputs())


@pytest.mark.parametrize("op", EACH)
@pytest.mark.parametrize("switch", SWITCHES)
def test_of_an_op(switch, op):
    program, expected = without(op)
    arrays = EACH[op].inputs()
    with SWITCHES[switch]():
        direct = EACH[op].fused(arrays), jax.grad(lambda a: sines(EACH[op].fused(a)))(arrays)
        found = jaxfuse.fuse(program, policy="always")(arrays)
    for got in (direct, found):
        for value, wanted in pairs(got, expected):
            assert distance(value, wanted) < 1e-4


def sines(outs):
    """Spelled so that it promotes nothing."""
    return functools.reduce(jnp.add, [jnp.sum(jnp.sin(y)) for y in outs])


@pytest.mark.parametrize("op", EACH)
@pytest.mark.parametrize("way", ["direct", "fused"])
def test_a_nan_has_its_place(way, op):
    arrays = EACH[op].inputs()
    first = next(iter(arrays))
    arrays[first] = arrays[first].at[(0,) * arrays[first].ndim].set(jnp.nan)
    function = EACH[op].fused if way == "direct" else jaxfuse.fuse(EACH[op].unfused, policy="always")
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\(nan\) encountered in"):
        function(arrays)


def test_a_nan_in_a_jitted_op_and_in_a_cotangent():
    x, w, cotangent = jnp.full((2, 16), jnp.nan), jnp.ones((16, 4)), jnp.full((2, 4), jnp.nan)
    pull_back = jax.vjp(jaxfuse.ops.dense, jnp.ones((2, 16)), w)[1]
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in jaxfuse_dense"):
            jax.jit(jaxfuse.ops.dense)(x, w)
        with pytest.raises(FloatingPointError, match=r"\(nan\) encountered in jaxfuse_dense_backward"):
            pull_back(cotangent)


def test_an_infinity_has_its_place():
    x, w = jnp.full((2, 16), 1e38), jnp.ones((16, 4))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf.* encountered in jaxfuse_dense"):
        jaxfuse.ops.dense(x, w)


def test_a_place_is_a_line_of_the_users():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        jaxfuse.fuse(lambda x, w: jnp.log(jax.nn.relu(x @ w) - 1), policy="always")(jnp.zeros((2, 16)), jnp.zeros((16, 4)))


@pytest.mark.parametrize("fused", [lambda f: jaxfuse.fuse(jax.jit(f)), lambda f: jaxfuse.fuse(jaxfuse.fuse(f)),
                                   lambda f: jax.jit(jaxfuse.fuse(f))], ids=["of a jit", "of a fuse", "in a jit"])
def test_a_place_under_a_gradient(fused):
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in div"):
        jax.grad(fused(lambda x: x / x))(0.0)


def test_under_disable_jit_the_users_lines_see_numbers():
    seen = []

    def network(x, w):
        seen.append(x)
        return jax.nn.relu(x @ w)

    with jax.disable_jit():
        jaxfuse.fuse(network, policy="always")(jnp.ones((2, 16)), jnp.ones((16, 4)))
    assert np.array_equal(seen[0], np.ones((2, 16)))


LINEAR = {"conv": ("x", "w"), "dense": ("x", "w")}


@pytest.mark.parametrize("fused", ["op", "fuse"])
@pytest.mark.parametrize("op, argument", [(op, name) for op, names in LINEAR.items() for name in names])
def test_transposed(op, argument, fused):
    case = CASES["conv-1x1_stride2" if op == "conv" else "dense-alone"]
    arrays = {name: a for name, a in case.inputs().items() if name != "bias"}

    def of(function):
        return lambda a: function(arrays | {argument: a})

    plain, ours = of(case.unfused), of(case.fused if fused == "op" else jaxfuse.fuse(case.unfused, policy="always"))
    y = jax.tree.map(jnp.sin, plain(arrays[argument]))
    expected = jax.linear_transpose(plain, arrays[argument])(y)
    linear = jax.linearize(ours, arrays[argument])[1]
    for transposed in (jax.linear_transpose(ours, arrays[argument]), jax.vjp(ours, arrays[argument])[1],
                       jax.linear_transpose(linear, arrays[argument])):
        for value, wanted in pairs(transposed(y), expected):
            assert distance(value, wanted) < 1e-5
    again = jax.linear_transpose(lambda y: jax.vjp(ours, arrays[argument])[1](y)[0], y)  # which is the op once more
    for value, wanted in pairs(again(arrays[argument])[0], plain(arrays[argument])):
        assert distance(value, wanted) < 1e-5
