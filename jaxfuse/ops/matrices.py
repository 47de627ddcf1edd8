"""A dot_general as matrix products in memory: sizes and strides, no copies."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Matrices:
    """`batch` products `[rows, inner]` · `[inner, columns]`. Strides, in elements, are of the batch axes and the two of the
    matrix, over row-major buffers."""

    batch: tuple[int, ...]
    rows: int
    inner: int
    columns: int
    x_strides: tuple[int, ...]
    w_strides: tuple[int, ...]

    def attributes(self) -> dict:
        """A number of products or of rows that is not known before the program runs is -1: the kernel sees it."""
        batch, rows = (tuple(n if isinstance(n, int) else -1 for n in sizes) for sizes in (self.batch, (self.rows,)))
        if (*batch, *rows).count(-1) > 1:
            raise NotImplementedError(f"of {self.batch} products of {self.rows} rows only one number may be unknown")
        return {name: np.asarray(value, np.int64) if isinstance(value, tuple) else value
                for name, value in (vars(self) | dict(batch=batch, rows=rows[0])).items()}


def matrices(x_shape: tuple[int, ...], w_shape: tuple[int, ...], dimension_numbers) -> Matrices | str:
    """Or a sentence that says why `lax.dot_general` of these shapes is none."""
    (x_contracted, w_contracted), (x_batch, w_batch) = dimension_numbers
    for shape in (x_shape, w_shape):
        if 0 in shape:
            return f"empty array of shape {shape}"
    pairs = sorted(zip(x_contracted, w_contracted))
    x_free = [d for d in range(len(x_shape)) if d not in (*x_contracted, *x_batch)]
    w_free = [d for d in range(len(w_shape)) if d not in (*w_contracted, *w_batch)]
    parts = dict(x=(x_shape, x_free, [d for d, _ in pairs]), w=(w_shape, [d for _, d in pairs], w_free))
    steps: dict[str, list[int]] = dict(x=[], w=[])
    for name, (shape, *sides) in parts.items():
        for axes in sides:
            step = _step(shape, axes)
            if step is None:
                return f"axes {tuple(axes)} of {name}, of shape {shape}, do not lie one after the other: no matrix in memory"
            steps[name].append(step)
        if 1 not in steps[name]:
            return f"the last axis of {name}, of shape {shape}, is a batch axis: no matrix in memory"
    batch = [(i, j) for i, j in zip(x_batch, w_batch) if x_shape[i] not in (0, 1)]
    return Matrices(
        tuple(x_shape[i] for i, _ in batch), _length(x_shape, x_free), _length(x_shape, x_contracted), _length(w_shape, w_free),
        (*[_stride(x_shape, i) for i, _ in batch], *steps["x"]), (*[_stride(w_shape, j) for _, j in batch], *steps["w"]))


def _length(shape, axes) -> int:
    return math.prod(shape[d] for d in axes)


def _stride(shape, axis: int) -> int:
    return math.prod(shape[axis + 1 :])


def _step(shape, axes) -> int | None:
    """From one element to the next along these axes taken as one; None if there is no such step."""
    axes = [d for d in axes if shape[d] not in (0, 1)]
    if any(_stride(shape, d) != _stride(shape, then) * shape[then] for d, then in zip(axes, axes[1:])):
        return None
    return _stride(shape, axes[-1]) if axes else 1
