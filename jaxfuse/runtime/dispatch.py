"""How XLA:CPU hands a program to a thread: it counts the program's operations, and none of a custom call."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxfuse.runtime import private

WORTH_A_THREAD = 1 << 20  # bytes that a call reads and writes; handing less over costs as much as it takes
COUNTED = 512  # elements; each counts as four operations
LIGHT = 1 << 16  # bytes that are copied sooner than anybody would notice
CARRIERS = 4  # calls of a program that carry its operations: one would do, if XLA left out no call. JAX lowers alike calls once

_waits = contextvars.ContextVar("waits", default=False)
_notes: contextvars.ContextVar[dict | None] = contextvars.ContextVar("notes", default=None)
_CARRYING = object()  # the key of the number of calls so far


@contextlib.contextmanager
def part_of(notes: dict) -> Iterator[None]:
    """A context in which calls are lowered as parts of the program whose rules share these notes."""
    token = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(token)


def waiting(run: Callable, *args: Any) -> Any:
    """`run(*args)`, where programs that are compiled on the way say nothing of their cost: XLA runs them on this thread where it sees
    no other operations. For networks of milliseconds, whose caller waits anyway."""
    token = _waits.set(True)
    try:
        return run(*args)
    finally:
        _waits.reset(token)


def with_cost(run: Any, out_types: Any, operands: tuple) -> Any:
    """`run(operands)`, equal bit for bit, with a few operations that XLA's cost analysis sees.

    XLA:CPU runs a program on the thread that calls it, which waits, if the program has less than 1,000 operations. It counts
    none for custom calls. So the first element of a result or of an operand is put together anew from its bits: of a light one,
    since XLA may copy all of it, as it does where a reshape follows. Where all are heavy only the program's first call has them.
    """
    results = list(out_types) if isinstance(out_types, (list, tuple)) else [out_types]
    if _waits.get() or private.is_symbolic((*results, *operands)) or sum(map(_bytes, (*results, *operands))) < WORTH_A_THREAD:
        return run(operands)
    heavy, result, operand = max(operands, key=_bytes), _lightest(results), _lightest(operands)
    is_light = result is not None or operand is not None
    if not isinstance(heavy, jax.core.Tracer) or _calls_so_far() > (CARRIERS if is_light else 1):
        return run(operands)
    if result is None and operand is not None:
        given = list(operands)
        given[operand] = _first_from(given[operand], heavy)
        return run(given)
    outputs = run(operands)
    if not isinstance(out_types, (list, tuple)):
        return _first_from(outputs, outputs)
    carrier = result or 0
    return [_first_from(output, output) if i == carrier else output for i, output in enumerate(outputs)]


def _calls_so_far() -> int:
    """Of this program, with this one."""
    notes = _notes.get()
    if notes is None:
        return 1
    notes[_CARRYING] = notes.get(_CARRYING, 0) + 1
    return notes[_CARRYING]


def _bytes(array: Any) -> int:
    return array.size * array.dtype.itemsize


def _lightest(arrays: Any) -> int | None:
    """The index of the smallest array of numbers; None where even that is heavy."""
    light = [i for i, array in enumerate(arrays) if 0 < _bytes(array) <= LIGHT and array.dtype != bool]
    return min(light, key=lambda i: _bytes(arrays[i]), default=None)


def _first_from(array: jax.Array, source: jax.Array) -> jax.Array:
    """The array. Its first element has passed through operations on the first element of the source, which XLA cannot leave out."""
    bits = _first_bits(source)
    places = lax.rem(lax.iota(bits.dtype, COUNTED), lax.full((), 8 * bits.dtype.itemsize, bits.dtype))
    masks = lax.shift_left(lax.full((COUNTED,), 1, bits.dtype), places)
    each = lax.bitwise_and(lax.broadcast(bits, (COUNTED,)), masks)
    whole = lax.reduce(each, bits.dtype.type(0), lax.bitwise_or, (0,))  # the bits again
    own = _first_bits(array)
    first = whole if array is source else lax.bitwise_xor(own, lax.bitwise_xor(whole, bits).astype(own.dtype))
    value = lax.bitcast_convert_type(first, array.dtype)
    return lax.dynamic_update_slice(array, lax.broadcast(value, (1,) * array.ndim), (0,) * array.ndim)


def _first_bits(array: jax.Array) -> jax.Array:
    first = lax.reshape(lax.slice(array, (0,) * array.ndim, (1,) * array.ndim), ())
    return lax.bitcast_convert_type(first, np.dtype(f"uint{8 * array.dtype.itemsize}"))
