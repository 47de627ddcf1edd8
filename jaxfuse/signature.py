"""Calls of a user's function: which arguments are traced, which belong to the signature, its trace, and its dispatch."""

import functools
import types

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxfuse import platforms, private

# Whether a function is being traced in order to be fused. JAX keeps traces that were made under another value apart.
_being_fused = jax.make_user_context(False)
STATIC = frozenset({bool, str, bytes, types.FunctionType, types.BuiltinFunctionType, types.MethodType})


class Untraceable(Exception):
    """The user's function cannot be traced for these arguments; the cause is what it raised."""


class Call:
    """Arguments of one call, taken apart.

    Arrays are traced. Python's ints and floats are traced too, so that a changing step or rate does not compile anew,
    unless `concrete`: then they belong to the signature, as bools, strings and everything else always do.
    """

    def __init__(self, args, kwargs, concrete: bool = False):
        leaves, self.tree = jax.tree.flatten((args, kwargs))
        traced = [_is_array(leaf) or not concrete and _is_number(leaf) for leaf in leaves]
        self.concrete = concrete
        self.has_numbers = any(map(_is_number, leaves))
        self.leaves = [leaf for leaf, t in zip(leaves, traced) if t]
        self.static = tuple((i, leaf) for i, (leaf, t) in enumerate(zip(leaves, traced)) if not t)
        self.key = self.tree, tuple((i, type(leaf), _hashable(leaf)) for i, leaf in self.static)

    def arguments(self, leaves):
        """(args, kwargs) with these in place of the traced leaves."""
        rest, static = iter(leaves), dict(self.static)
        whole = [static[i] if i in static else next(rest) for i in range(len(static) + len(leaves))]
        return jax.tree.unflatten(self.tree, whole)

    def trace(self, fn) -> tuple[ClosedJaxpr, object]:
        """The program of fn for these leaves, and the tree of its outputs."""

        def of_leaves(*leaves):
            args, kwargs = self.arguments(leaves)
            return fn(*args, **kwargs)

        try:
            with _being_fused(True):
                closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*self.leaves)
        except Exception as error:
            raise Untraceable(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        return closed, jax.tree.structure(shapes)

    def donated(self, fn) -> tuple[int, ...]:
        """Positions among the leaves that fn, if it is jitted, takes over the memory of."""
        if not hasattr(fn, "trace"):
            return ()
        args, kwargs = self.arguments(self.leaves)
        try:
            info = jax.tree.leaves(fn.trace(*args, **kwargs).args_info)
        except Exception:  # tracing reports it, with its cause
            return ()
        flags = [a.donated for a in info]
        return tuple(i for i, flag in enumerate(flags) if flag) if len(flags) == len(self.leaves) else ()


def is_part_of_a_program() -> bool:
    """Whether a caller is being traced in order to be fused: what it calls stays plain, so that it sees it all."""
    return _being_fused.value


def compiled(fn, run, give_up):
    """fn, by way of `jax.jit(run)`; `run` takes fn's arguments and raises `Untraceable` where fn cannot be traced.

    `jax.jit` dispatches every call, as it would those of fn: looking at hundreds of leaves here would cost as much again.
    It knows nothing of bools, strings and other objects deep in the arguments. Where it fails, the leaves are looked at
    one by one. Where that fails too, `give_up(failure)` is called and fn runs as it is.
    """
    options = private.jit_options(fn)
    at_once: dict = {}  # form -> jitted run; None: to be called leaf by leaf
    by_leaves: dict = {}  # signature -> jitted function of the traced leaves; None: fn cannot be traced
    needs_numbers: set = set()  # signatures for which fn needs to know the numbers

    def call(*args, **kwargs):
        if is_part_of_a_program():
            return fn(*args, **kwargs)
        if (platform := platforms.committed((args, kwargs))) and platform != platforms.current():
            with platforms.assumed(platform):
                return call(*args, **kwargs)
        form = tuple([type(a) in STATIC for a in args]), tuple([(name, type(a) in STATIC) for name, a in kwargs.items()])
        if form not in at_once:
            at_once[form] = jax.jit(_without_bools(run) if options is None else run, **options or _static(form))
        if at_once[form] is not None:
            try:
                return at_once[form](*args, **kwargs)
            except (Untraceable, TypeError, ValueError, OverflowError):
                pass
        result = leaf_by_leaf(Call(args, kwargs), args, kwargs)  # if fn itself fails, nothing is learnt from it
        at_once[form] = None
        return result

    def leaf_by_leaf(call: Call, args, kwargs):
        tracing_numbers = call.has_numbers and not call.concrete
        if tracing_numbers and call.key in needs_numbers:
            return leaf_by_leaf(Call(args, kwargs, concrete=True), args, kwargs)
        if call.key not in by_leaves:
            by_leaves[call.key] = jax.jit(functools.partial(_with, call, run), donate_argnums=call.donated(fn))
        if by_leaves[call.key] is not None:
            try:
                return by_leaves[call.key](*call.leaves)
            except Untraceable as failure:
                if tracing_numbers:
                    result = leaf_by_leaf(Call(args, kwargs, concrete=True), args, kwargs)
                    needs_numbers.add(call.key)
                    return result
                give_up(failure)
        result = fn(*args, **kwargs)
        by_leaves[call.key] = None
        return result

    return functools.wraps(fn)(call)


def _with(call: Call, run, *leaves):
    args, kwargs = call.arguments(leaves)
    return run(*args, **kwargs)


def _static(form) -> dict:
    positions, names = form
    return dict(static_argnums=[i for i, static in enumerate(positions) if static],
                static_argnames=[name for name, static in names if static])


def _without_bools(run):
    """A bool is traced by `jax.jit`; what is one here may have been one of Python's, which belongs to the signature."""

    def checked(*args, **kwargs):
        traced = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.Array)]
        if any(leaf.dtype == bool and leaf.ndim == 0 for leaf in traced):
            raise Untraceable("a bool")
        return run(*args, **kwargs)

    return checked


def _is_array(leaf) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm"  # objects, strings and times
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or hasattr(leaf, "__jax_array__")


def _is_number(leaf) -> bool:
    """Python's own, if it fits into an array."""
    if isinstance(leaf, bool):
        return False
    return isinstance(leaf, (float, complex)) or isinstance(leaf, int) and -(2**31) <= leaf < 2**31


def _hashable(leaf):
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf
