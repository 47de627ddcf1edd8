"""The leaves of a frozen function's arguments: which are arrays, and of what type they are traced."""

import jax
import jax.numpy as jnp
import numpy as np


def is_array(leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def as_array(leaf):
    """Python's numbers are traced, as `jax.jit` traces them."""
    return jnp.asarray(leaf) if isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool) else leaf


def unshared(leaf):
    """A copy of what its owner may write to: what is frozen does not change."""
    return jnp.array(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def type_of(leaf):
    """Of an array; anything else itself."""
    if not is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
