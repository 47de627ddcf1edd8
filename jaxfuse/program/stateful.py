"""Flax nnx's objects as arguments: `nnx.jit` carries their state in and out. Flax is never imported here, only found.

Tried with Flax 0.12.8 and 0.12.12.
"""

import copy
import sys
from typing import Any

import jax

from jaxfuse.runtime import private


def holds_state(tree) -> bool:
    """Whether modules, optimizers, metrics or variables are in the tree. An `nnx.State` is data, and is not meant."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.State) or is_state(node))
    return any(map(is_state, nodes))


def is_state(node) -> bool:
    """Whether it is one of them."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, (nnx.Pytree, nnx.Variable))


def is_nnx_jit(fn) -> bool:
    """Whether fn is what `nnx.jit` returns."""
    return type(fn).__module__.startswith("flax.nnx.") and hasattr(fn, "jitted_fn")


def carried(fn, options: dict, jitted):
    """`nnx.jit(fn, **options)`, or fn if it is one, whose function of arrays is `jitted(function, options)` instead of `jax.jit`."""
    carrier = copy.copy(fn if is_nnx_jit(fn) and not options else sys.modules["flax.nnx"].jit(fn, **options))
    pure = copy.copy(private.unjitted(carrier.jitted_fn))
    if hasattr(pure, "ctxtag"):  # of graph mode: whose state is being carried
        pure.ctxtag = carrier
    carrier.jitted_fn = jitted(pure, private.jit_options(carrier.jitted_fn))
    return carrier
