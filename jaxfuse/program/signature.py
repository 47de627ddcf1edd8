"""Calls of a user's function: which arguments are traced, which are kept as they are, and its trace."""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxfuse.program.remedies import remedy

# Whether a function is being traced in order to be fused. JAX keeps traces that were made under another value apart.
_being_fused = jax.make_user_context(False)


@jax.tree_util.register_static
class Constant:
    """Stands for a leaf of arguments that is not traced: it is part of their structure."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or _is_hashable(self.value) and self.value == other.value

    def __hash__(self):
        return hash(self.value) if _is_hashable(self.value) else id(self.value)


class Traced(NamedTuple):
    """The program of a function for some arguments, its traced leaves among them, and the tree of its outputs."""

    closed: ClosedJaxpr
    leaves: list
    out_tree: jax.tree_util.PyTreeDef


def trace(fn, args, kwargs, concrete: bool = True, is_traced=None) -> Traced:
    """Traces fn for these arguments; raises what fn raises, with a note of what to do where that is known.

    Arrays are traced. So are Python's ints and floats, unless `concrete`. Bools, strings and everything else stay as they are.
    """

    def given(leaf):
        return leaf if (is_traced or _is_array)(leaf) or not concrete and _is_number(leaf) else Constant(leaf)

    @functools.partial(functools.update_wrapper, wrapped=fn, updated=())
    def whole(*args, **kwargs):
        args, kwargs = without_constants((args, kwargs))
        return fn(*args, **kwargs)

    args, kwargs = jax.tree.map(given, (args, kwargs))
    try:
        with _being_fused(True):
            closed, shapes = jax.make_jaxpr(whole, return_shape=True)(*args, **kwargs)
    except Exception as error:
        if words := remedy(error):
            error.add_note(f"jaxfuse: {words}")
        raise
    return Traced(closed, jax.tree.leaves((args, kwargs)), jax.tree.structure(shapes))


def without_constants(tree):
    """The tree with what its `Constant`s stand for in their place."""
    return jax.tree.map(_value, tree, is_leaf=lambda node: isinstance(node, Constant))


def as_a_program_of_its_own():
    """A context in which a function is fused by itself, wherever it is called."""
    return _being_fused(False)


def is_part_of_a_program() -> bool:
    """Whether a caller is being traced in order to be fused: what it calls stays plain, so that it sees it all."""
    return _being_fused.value


def _is_array(leaf) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUMm"  # objects, strings and times
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or hasattr(leaf, "__jax_array__")


def _is_number(leaf) -> bool:
    """Python's own, if it fits into an array."""
    if isinstance(leaf, bool):
        return False
    return isinstance(leaf, (float, complex)) or isinstance(leaf, int) and -(2**31) <= leaf < 2**31


def _value(leaf):
    return leaf.value if isinstance(leaf, Constant) else leaf


def _is_hashable(value) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
