"""Columns of arrays, which side by side and added up are an operand of a fused sequence."""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Columns(NamedTuple):
    """These features of an array, which has them along `axis`, -1 or -2; None: the array is one number. All gates' columns may be
    the whole array again, whose gradient is one array; that of slices put side by side XLA makes of one padded array for each."""

    array: Any
    axis: int
    features: range | None
    casts: tuple = ()
    negative: bool = False

    @property
    def dtype(self):
        return self.casts[-1] if self.casts else self.array.dtype

    def placed(self, lead: tuple[int, ...], size: int, all_features: bool = False):
        """As `[*lead, size]`."""
        array, features = self.array, self.features
        if features is not None and not all_features:
            array = lax.slice_in_dim(array, features.start, features.stop, features.step, self.axis)
        array = jnp.swapaxes(array, -1, -2) if self.axis == -2 else array
        for dtype in self.casts:
            array = array.astype(dtype)
        if 0 < array.ndim <= len(lead):  # it has no batch
            array = jnp.expand_dims(array, -2)
        return jnp.broadcast_to(-array if self.negative else array, (*lead, size))


def side_by_side(gates: list[list[Columns]], lead: tuple[int, ...], hidden: int, dtype):
    """The sums of the gates' columns as `[*lead, gates·hidden]`."""
    if any(len(parts) != len(gates[0]) for parts in gates) or not gates[0]:
        return jnp.concatenate([_sum([part.placed(lead, hidden) for part in parts], (*lead, hidden), dtype) for parts in gates], -1)
    size = len(gates) * hidden
    arrays = [parts[0].placed(lead, size, True) if _is_whole(parts, size) else
              jnp.concatenate([part.placed(lead, hidden) for part in parts], -1) for parts in zip(*gates)]
    return _sum(arrays, (*lead, size), dtype)


def _is_whole(parts: tuple[Columns, ...], size: int) -> bool:
    """Whether the parts side by side are the array that all of them are of, which has so many features."""
    first = parts[0]
    same = all(part.array is first.array and part[3:] == first[3:] and part.axis == first.axis for part in parts)
    return same and [i for part in parts for i in part.features or ()] == list(range(size)) == list(range(first.array.shape[first.axis]))


def _sum(arrays: list, shape: tuple[int, ...], dtype):
    return functools.reduce(operator.add, [jnp.asarray(array, dtype) for array in arrays]) if arrays else jnp.zeros(shape, dtype)
