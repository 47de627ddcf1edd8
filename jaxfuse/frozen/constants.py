"""A function bound to the constants that it is called with: large ones are arguments of its program, small ones are written into it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxfuse.runtime import dispatch

SMALL = 1 << 16  # bytes; for each argument of a program a call takes JAX and XLA about a microsecond more


def bind(run: Callable, constants: Sequence[jax.Array]) -> Callable:
    """`jax.jit(run)(constants, ...)` as a function of the rest, which waits for it where XLA lets it."""
    small = {i: np.asarray(array) for i, array in enumerate(constants) if _is_written(array)}
    large = [array for i, array in enumerate(constants) if i not in small]

    def whole(large: Sequence, *rest: Any):
        given = iter(large)
        return run([small[i] if i in small else next(given) for i in range(len(constants))], *rest)

    return functools.partial(dispatch.waiting, jax.jit(functools.update_wrapper(whole, run, updated=())), large)


def _is_written(array: jax.Array) -> bool:
    """Neither one whose device is part of what the user asked for, nor one that numpy has no type for."""
    plain = not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended) and not array.weak_type
    return plain and array.nbytes <= SMALL and not array.committed
