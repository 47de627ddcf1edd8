"""A function bound to the constants that it is called with: large ones are arguments of its program, the others are written into it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxfuse.runtime import dispatch

WRITTEN = 1 << 23  # bytes, in all, that a program has beside the arrays themselves
LARGE = 1 << 20  # bytes; for each argument a call takes JAX and XLA about four microseconds more


def bind(run: Callable, constants: Sequence[jax.Array]) -> Callable:
    """`jax.jit(run)(constants, ...)` as a function of the rest, which waits for it where XLA lets it."""
    written = {i: np.asarray(constants[i]) for i in _written(constants)}
    given = [array for i, array in enumerate(constants) if i not in written]

    def whole(given: Sequence, *rest: Any):
        arguments = iter(given)
        return run([written[i] if i in written else next(arguments) for i in range(len(constants))], *rest)

    return functools.partial(dispatch.waiting, jax.jit(functools.update_wrapper(whole, run, updated=())), given)


def _written(constants: Sequence[jax.Array]) -> list[int]:
    """Which are written into the program: the smallest. Never one whose device is part of what the user asked for, nor one that numpy
    has no type for."""
    plain = [i for i, array in enumerate(constants) if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
             and not array.weak_type and array.nbytes <= LARGE and not array.committed]
    plain.sort(key=lambda i: constants[i].nbytes)
    bytes_so_far = np.cumsum([constants[i].nbytes for i in plain])
    return plain[: np.searchsorted(bytes_so_far, WRITTEN, side="right")]
