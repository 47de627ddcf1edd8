"""Modules that are called, of Flax nnx and of Equinox, as functions of their arrays, which `freeze` can bind."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from jaxfuse.frozen.leaves import is_array, type_of
from jaxfuse.ops.errors import OpError


def of_module(fn) -> tuple[Callable, tuple, tuple[int, ...]]:
    """(function, bound, positions) of a module that is called: its arrays are the first argument."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(fn, nnx.Module):
        structure, state = nnx.split(fn)

        def of_state(state, *args, **kwargs):
            before = _by_path(state)
            module = nnx.merge(structure, state)
            result = module(*args, **kwargs)
            _require_unchanged(nnx, module, before)
            return result

        return functools.update_wrapper(of_state, type(fn).__call__), (state,), (0,)
    leaves, tree = jax.tree.flatten(fn)
    if jax.tree_util.treedef_is_leaf(tree):  # a function
        return fn, (), ()

    def of_arrays(arrays, *args, **kwargs):
        given = iter(arrays)
        return jax.tree.unflatten(tree, [next(given) if is_array(leaf) else leaf for leaf in others])(*args, **kwargs)

    others = list(map(type_of, leaves))
    return functools.update_wrapper(of_arrays, type(fn).__call__), ([leaf for leaf in leaves if is_array(leaf)],), (0,)


def _require_unchanged(nnx, module, before: dict[tuple, Any]) -> None:
    """Raises OpError where a call has changed the module: running averages, a cache, dropout's keys. All of it is constant here."""
    # They ask for a key to make the zeros that a sequence begins with.
    cells = {path for path, each in nnx.iter_modules(module) if isinstance(each, (nnx.RNN, nnx.RNNCellBase))}
    changed = [".".join(map(str, path)) for path, leaf in _by_path(nnx.state(module)).items()
               if before.get(path, leaf) is not leaf and not (path[-2:] == ("rngs", "count") and path[:-2] in cells)]
    if changed:
        raise OpError(f"jaxfuse.freeze: a call changes {', '.join(changed)} of the module, which is constant once it is frozen; call "
                      "model.eval() before freeze")


def _by_path(state) -> dict[tuple, Any]:
    """The arrays of an nnx.State by the names on the way to them."""
    return {tuple(key.key for key in path if hasattr(key, "key")): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
