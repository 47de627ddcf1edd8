"""A pytest plugin for other projects' tests: every function that they jit is fused, or their layers are exchanged for ours.

JAXFUSE_OTHERS is "plain" (nothing is changed), "fused" (`jax.jit` is `jaxfuse.fuse` with policy "always", and so is what the tests
call outside of jit: functions that JAX's tests compare or differentiate, `apply` of linen and haiku, Equinox's layers), "jitted" (the
same with `jax.jit` itself, which some tests do not stand) or "layers" (Flax's layers are those of `jaxfuse.flax`). The numbers of
sites that were fused, or of layers of ours that were made, are added up in the file that JAXFUSE_OTHERS_SITES names.
"""

import functools
import inspect
import os
import sys

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

MODE = os.environ.get("JAXFUSE_OTHERS", "plain")
layers: list[int] = []


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config, parser, args):
    """Before a conftest.py imports what keeps a `jax.jit` of its own."""
    if MODE == "fused":
        _fuse_every_jit()
    if MODE in ("fused", "jitted"):
        _fuse_what_runs_eagerly(os.environ["JAXFUSE_OTHERS_PROJECT"])
    if MODE == "layers":
        _exchange_layers()


def pytest_unconfigure(config):
    if path := os.environ.get("JAXFUSE_OTHERS_SITES"):
        with open(path, "a") as file:
            print(_sites() if MODE == "fused" else len(layers), file=file)


def _sites() -> int:
    import jaxfuse

    return sum(jaxfuse.counters().fused.values())


def _compiled(function):
    if MODE == "jitted":
        return jax.jit(function)
    import jaxfuse

    return jaxfuse.fuse(function, policy="always")


def _fuse_every_jit():
    import jaxfuse

    plain = jax.jit

    def jit(*args, **options):
        caller = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        # Flax's own jits carry state, which a test's fused function leaves to them
        return plain(*args, **options) if caller in ("flax", "jaxfuse") else jaxfuse.fuse(*args, policy="always", **options)

    jax.jit = jit


def _fuse_what_runs_eagerly(project: str):
    if project == "jax":
        from jax._src import test_util

        case = test_util.JaxTestCase
        case._CheckAgainstNumpy = _with_argument(_fused, case._CheckAgainstNumpy, 2)
        case._CompileAndCheck = _with_argument(_fused_in_jit, case._CompileAndCheck, 1)
        test_util.check_grads = jax.test_util.check_grads = _with_argument(_fused, test_util.check_grads, 0)
        for name in ("grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "vmap"):
            setattr(jax, name, _of_tests(getattr(jax, name)))
    if project == "flax":
        import flax.linen
        import flax.nnx

        module = flax.linen.Module
        module.apply, module.init_with_output = _fused(module.apply), _fused(module.init_with_output)
        _each_layer(flax.nnx, flax.nnx.Module, _fused_with_state)
    if project == "haiku":
        from haiku._src import transform

        plain = transform.transform_with_state
        transform.transform_with_state = lambda *args, **kwargs: (made := plain(*args, **kwargs))._replace(apply=_fused(made.apply))
    if project == "equinox":
        import equinox.nn

        _each_layer(equinox.nn, equinox.Module, _fused)


def _each_layer(package, base: type, change):
    for layer in vars(package).values():
        if inspect.isclass(layer) and issubclass(layer, base) and "__call__" in vars(layer):
            layer.__call__ = change(layer.__call__)


def _with_argument(change, function, at: int):
    """The function with its argument number `at`, a function, changed."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args[:at], change(args[at]), *args[at + 1 :], **kwargs)

    return call


def _of_tests(transformation):
    """A transformation of JAX that tests call with a function; JAX calls it too, as it was."""

    @functools.wraps(transformation)
    def call(function, *args, **kwargs):
        by_test = sys._getframe(1).f_globals["__name__"].startswith("tests")
        return transformation(_fused(function) if by_test else function, *args, **kwargs)

    return call


def _fused_in_jit(function):
    """Outside of jit it is as it was: the test compares the two."""
    fused = _fused(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
        return (fused if is_traced else function)(*args, **kwargs)

    return call


def _fused(function):
    """The function, fused over those of its arguments that are arrays of floating point; as it is where it cannot be traced so."""
    made: dict = {}  # by what is no array; None where it cannot be traced

    def of_arrays(fixed, tree, arrays):
        args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(fixed)])
        return function(*args, **kwargs)

    @functools.wraps(function)
    def call(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_number(leaf)}
        fixed = [None if i in arrays else leaf for i, leaf in enumerate(leaves)]
        key = tree, tuple(map(id, fixed)), tuple(arrays)
        if key not in made:
            of_these = functools.partial(of_arrays, fixed, tree)
            made[key] = _compiled(of_these)
            if not _can_be_traced(made[key], arrays) and not _can_be_traced(jax.jit(of_these), arrays):
                made[key] = None
        return function(*args, **kwargs) if made[key] is None else made[key](arrays)

    return call


def _can_be_traced(jitted, arrays) -> bool:
    """What is wrong with it otherwise, the test has without us. Traced so, it is not traced again where it is called: some tests count."""
    try:
        jitted.eval_shape(arrays)
    except Exception:
        return False
    return True


def _is_number(leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _fused_with_state(method):
    """As `_fused`, of a method of nnx: the module is carried in and out."""
    import flax.nnx

    @functools.wraps(method)
    def call(module, *args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if _is_number(leaf)}
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return method(module, *args, **kwargs)

        def of_arrays(module, arrays):
            args, kwargs = jax.tree.unflatten(tree, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
            return method(module, *args, **kwargs)

        jitted = flax.nnx.jit(of_arrays)
        try:
            jitted(flax.nnx.clone(module), arrays)
        except Exception:  # whatever it is, the test has it without us
            return method(module, *args, **kwargs)
        return (jitted if MODE == "jitted" else _compiled(of_arrays))(module, arrays)

    return call


def _exchange_layers():
    import flax.linen
    import flax.nnx

    import jaxfuse.flax.linen
    import jaxfuse.flax.nnx

    for theirs, ours in ((flax.linen, jaxfuse.flax.linen), (flax.nnx, jaxfuse.flax.nnx)):
        for name in ours.__all__:
            if isinstance(getattr(theirs, name, None), type):
                setattr(theirs, name, _counted(getattr(ours, name)))


def _counted(layer):
    make = layer.__init__

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        layers.append(1)
        make(self, *args, **kwargs)

    layer.__init__ = __init__
    return layer
