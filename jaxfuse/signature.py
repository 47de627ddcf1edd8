"""Calls of a user's function: which arguments are traced, which are part of the signature, and its trace."""

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr


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

    def trace(self, fn, leaves) -> tuple[ClosedJaxpr, object]:
        """The program of fn for these leaves, and the tree of its outputs."""

        def of_leaves(*leaves):
            args, kwargs = self.arguments(leaves)
            return fn(*args, **kwargs)

        try:
            closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
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


def _is_array(leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)) or hasattr(leaf, "__jax_array__")


def _is_number(leaf) -> bool:
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)


def _hashable(leaf):
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf
