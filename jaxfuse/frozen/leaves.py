"""The leaves of a frozen function's arguments: which are arrays, and of what type they are traced."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.ops import stage


def is_array(leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def as_array(leaf):
    """Python's numbers are traced, as `jax.jit` traces them."""
    return jnp.asarray(leaf) if isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool) else leaf


def unshared(leaf):
    """A copy of what its owner may write to: what is frozen does not change."""
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    with jax.ensure_compile_time_eval():  # also in a program that is being traced
        return jnp.array(leaf)


def type_of(leaf):
    """Of an array, with what meshes add to it; anything else itself."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return weakly(jax.typeof(leaf))
    if not is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def weakly(aval) -> jax.ShapeDtypeStruct:
    """`stage.type_of`, which may be weak."""
    return stage.type_of(aval, getattr(aval, "weak_type", False))
