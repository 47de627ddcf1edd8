"""JAX's transformations and their compositions, over one case for each kind of rule behind them."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify, jet

import jaxfuse
from cases import CASES, CORE
from compare import as_float64, distance, jit, pairs


def loss(function):
    return lambda arrays: sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(function(arrays)))


def grad(function):
    return jax.grad(loss(function))


def grad_of(wanted):
    """Gradients of some arguments only."""

    def transformed(function, arrays):
        some = {name: a for name, a in arrays.items() if wanted(name, a)}
        return grad(lambda some: function(arrays | some))(some)

    return transformed


def several(arrays, names=None, axis=0):
    """Three of each argument in `names` along `axis`, and vmap's in_axes for them."""
    axes = {name: axis if names is None or name in names else None for name in arrays}
    stacked = {
        name: a if axes[name] is None else jnp.stack([a, 0.9 * a[::-1], 1.1 * a], axes[name])
        for name, a in arrays.items()
    }
    return stacked, (axes,)


def vmapped(of, names=None, axis=0):
    def transformed(function, arrays):
        stacked, in_axes = several(arrays, names, axis)
        return jax.vmap(of(function), in_axes, axis_size=3)(stacked)

    return transformed


def over_vmap(of, names=None):
    def transformed(function, arrays):
        stacked, in_axes = several(arrays, names)
        return of(jax.vmap(function, in_axes, axis_size=3))(stacked)

    return transformed


def jvp_of(wanted):
    def transformed(function, arrays):
        some = {name: a for name, a in arrays.items() if wanted(name)}
        return jax.jvp(lambda some: function(arrays | some), (some,), (jax.tree.map(jnp.cos, some),))

    return transformed


def tangent(function):
    return lambda arrays: jax.jvp(function, (arrays,), (jax.tree.map(jnp.cos, arrays),))[1]


def scanned(function):
    def transformed(arrays):
        first = next(name for name in FULL if name in arrays)
        xs = several(arrays, [first])[0][first]
        return jax.lax.scan(lambda carry, x: (carry, function(arrays | {first: x})), 0.0, xs)[1]

    return transformed


def either(function):
    def transformed(arrays):
        return jax.lax.cond(jax.tree.leaves(arrays)[-1].sum() < 1e9, function, lambda a: jax.tree.map(jnp.cos, function(a)), arrays)

    return transformed


def applied(of):
    return lambda function, arrays: of(function)(arrays)


FULL = ("x", "residual", *"qkv")
FIRST_ARRAY = "x", "q"
TRANSFORMATIONS = {
    "nothing": applied(lambda f: f),
    "grad": applied(grad),
    "grad of x": grad_of(lambda name, a: name in FIRST_ARRAY),
    "grad of all but x": grad_of(lambda name, a: name not in FIRST_ARRAY),
    "grad of vectors": grad_of(lambda name, a: a.ndim == 1),
    "vmap of x": vmapped(lambda f: f, FIRST_ARRAY),
    "vmap of the last axis": vmapped(lambda f: f, FULL, axis=-1),
    "vmap of all": vmapped(lambda f: f),
    "vmap of all but x": vmapped(lambda f: f, ["w", "bias", "scale", "gamma", "mean", "k", "v"]),
    "vmap of grad": vmapped(grad),
    "vmap of grad at one w": vmapped(grad, FULL),
    "vmap of jvp": vmapped(tangent, FIRST_ARRAY),
    "grad of vmap": over_vmap(grad, FULL),
    "grad of vmap of all": over_vmap(grad),
    "jvp of vmap": over_vmap(tangent, FULL),
    "jvp": jvp_of(lambda name: True),
    "jvp of x": jvp_of(lambda name: name in FIRST_ARRAY),
    "jvp of all but x": jvp_of(lambda name: name not in FIRST_ARRAY),
    "linearize": lambda f, arrays: jax.linearize(f, arrays)[1](jax.tree.map(jnp.cos, arrays)),
    "forward over reverse": applied(lambda f: tangent(grad(f))),
    "reverse over reverse": applied(lambda f: grad(grad(f))),
    "reverse over forward": applied(lambda f: grad(tangent(f))),
    "forward over forward": applied(lambda f: tangent(tangent(f))),
    "vmap of forward over reverse": vmapped(lambda f: tangent(grad(f)), FULL),
    "scan": applied(scanned),
    "grad of scan": applied(lambda f: grad(scanned(f))),
    "vmap of grad of scan": vmapped(lambda f: grad(scanned(f)), FULL),
    "remat": applied(lambda f: grad(jax.checkpoint(f))),
    "cond": applied(lambda f: grad(either(f))),
    "nested jit": applied(lambda f: grad(jax.jit(f))),
}


@functools.cache
def transformed_truth(case, transformation):
    with jax.enable_x64(True):
        return jit(functools.partial(TRANSFORMATIONS[transformation], case.unfused))(as_float64(case.inputs()))


# Second derivatives are taken of the reference: one case of each op's is enough, and they take long to compile.
SECOND = [name for name in TRANSFORMATIONS if " over " in name]
FIRST = {CASES[name].module: name for name in reversed(CORE)}.values()
ROWS = [(name, kind) for name in CORE for kind in TRANSFORMATIONS if kind not in SECOND or name in FIRST]


@pytest.mark.parametrize("name, transformation", ROWS)
@pytest.mark.parametrize("kernel", ["installed"], indirect=True)
def test_transformation(name, transformation, kernel):
    case = CASES[name]
    got = jit(functools.partial(TRANSFORMATIONS[transformation], case.fused))(case.inputs())
    for value, exact in pairs(got, transformed_truth(case, transformation)):
        assert distance(value, exact) < 5e-5


@pytest.mark.parametrize("transformation", ["nothing", "grad", "vmap of all"])
@pytest.mark.parametrize("name", CORE)
def test_without_jit(name, transformation, kernel):
    case = CASES[name]
    got = TRANSFORMATIONS[transformation](case.fused, case.inputs())
    for value, exact in pairs(got, transformed_truth(case, transformation)):
        assert distance(value, exact) < 5e-5


@pytest.mark.parametrize("name", CORE)
def test_no_items(name):
    """`vmap` over an axis of length 0, of the value and of gradients."""
    case = CASES[name]
    arrays = {name: jnp.zeros((0, *a.shape), a.dtype) for name, a in case.inputs().items()}
    for of in (lambda f: f, grad):
        mapped = (jax.vmap(of(function)) for function in (case.fused, case.unfused))
        shapes = [jax.tree.map(jnp.shape, jit(function)(arrays)) for function in mapped]
        assert shapes[0] == shapes[1]


SERIES = {
    "dense": lambda x, w, b: jax.nn.gelu(x @ w + b),
    "layer norm": lambda x, w, b: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * b,
}


@pytest.mark.usefixtures("some_kernel")
@pytest.mark.parametrize("name", SERIES)
def test_taylor_series(name):
    arrays = [jnp.cos(jnp.arange(float(math.prod(shape)))).reshape(shape) for shape in ((4, 8), (8, 8), (8,))]
    fused, plain = (jet.jet(wrap(SERIES[name]), arrays, [(a, 0.5 * a, 0.1 * a) for a in arrays])
                    for wrap in (functools.partial(jaxfuse.fuse, policy="always"), lambda f: f))
    for value, exact in pairs(fused, plain):
        assert distance(value, exact) < 1e-4


@pytest.mark.usefixtures("some_kernel")
def test_checks_for_nans():
    """`checkify` asks of ours what it asks of JAX's own."""
    function = jaxfuse.fuse(lambda x: jax.nn.relu(x @ jnp.ones((8, 8))), policy="always")
    checked = checkify.checkify(function, checkify.nan_checks)
    assert checked(jnp.ones((4, 8)))[0].get() is None
    assert "nan generated by primitive: jaxfuse_dense" in checked(jnp.full((4, 8), jnp.nan))[0].get()


@pytest.mark.usefixtures("some_kernel")
def test_a_weak_type_stays():
    function = lambda a: jax.nn.relu(jnp.broadcast_to(a, (4, 8)) @ jnp.broadcast_to(a, (8, 8)))
    made, plain = (wrap(function)(0.5) for wrap in (functools.partial(jaxfuse.fuse, policy="always"), jax.jit))
    assert made.weak_type and plain.weak_type and (made + jnp.bfloat16(1)).dtype == jnp.bfloat16
