"""An operation graph of cuDNN as plain data, a pure function of what is to be computed: no library is needed to build, compare
or hash one. Every sum and every pointwise step is in float32, whatever the dtypes of the arrays are."""

import dataclasses
import math
from collections.abc import Hashable
from typing import Any, NamedTuple

FLOAT = "float32"


class Layout(NamedTuple):
    """How an array lies in memory: its extents and strides (in elements) in cuDNN's order, batch, channels, spatial."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]


def row_major(dtype, shape, axes) -> Layout:
    """The layout of a row-major array whose batch axis is axes[0], whose channel axis is axes[1], and so on; of a filter these
    are the output and the input channels."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return Layout(str(dtype), tuple(shape[d] for d in axes), tuple(strides[d] for d in axes))


def per_channel(dtype, channels: int, rank: int) -> Layout:
    """A vector that repeats along every axis but the channels'."""
    return Layout(str(dtype), (1, channels, *[1] * (rank - 2)), (channels, 1, *[channels] * (rank - 2)))


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A value of the graph. A virtual one is never in memory."""

    uid: int
    layout: Layout
    virtual: bool


class Operation(NamedTuple):
    """`kind` is a key of `backend.OPERATIONS`, `tensors` are (role, uid), `settings` are (name, value)."""

    kind: str
    tensors: tuple[tuple[str, int], ...]
    settings: tuple[tuple[str, Hashable], ...] = ()


@dataclasses.dataclass(frozen=True)
class Graph:
    """`bound` are the uids of the operands, then of the results, in the order in which the handler is called."""

    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    bound: tuple[int, ...]


class Builder:
    """Takes the operands first, in the order of the call, then the operations; `finish` names the results."""

    def __init__(self):
        self._tensors: list[Tensor] = []
        self._operations: list[Operation] = []

    def operand(self, layout: Layout) -> Tensor:
        tensor = Tensor(len(self._tensors) + 1, layout, virtual=False)
        self._tensors.append(tensor)
        return tensor

    def convolution(self, x: Tensor, w: Tensor, y: Layout, window) -> Tensor:
        """y of (x, w); `window` as `window_of` gives it."""
        out = self._value(y)
        self._operations.append(Operation("convolution", (("x", x.uid), ("w", w.uid), ("y", out.uid)), window))
        return out

    def pointwise(self, mode: str, x: Tensor, b: Tensor | None = None, **settings) -> Tensor:
        """`mode` is a key of `backend.POINTWISE`."""
        out = self._value(x.layout)
        operands = (("x", x.uid), *([("b", b.uid)] if b else []), ("y", out.uid))
        self._operations.append(Operation("pointwise", operands, (("mode", mode), *sorted(settings.items()))))
        return out

    def finish(self, operands, results) -> Graph:
        """`results` are (tensor, dtype): what is written to memory, and as what."""
        dtypes = {tensor.uid: str(dtype) for tensor, dtype in results}
        for uid, dtype in dtypes.items():
            layout = self._tensors[uid - 1].layout
            self._tensors[uid - 1] = Tensor(uid, layout._replace(dtype=dtype), virtual=False)
        bound = tuple(t.uid for t in operands) + tuple(t.uid for t, _ in results)
        return Graph(tuple(self._tensors), tuple(self._operations), bound)

    def _value(self, like: Layout) -> Tensor:
        tensor = Tensor(len(self._tensors) + 1, like._replace(dtype=FLOAT), virtual=True)
        self._tensors.append(tensor)
        return tensor


class PointwiseStep(NamedTuple):
    """`mode` is a key of `backend.POINTWISE`, `settings` has those of `backend` that are not as usual."""

    mode: str
    settings: dict[str, Any] = {}


def window_of(strides, padding, dilation):
    """The settings of a convolution: a stride, a pair of paddings and a dilation for each spatial axis."""
    low, high = zip(*padding)
    return (("strides", tuple(strides)), ("low", tuple(low)), ("high", tuple(high)), ("dilation", tuple(dilation)))


def convolution(x: Layout, w: Layout, y: Layout, window, *, scale=None, bias=None, residual=None,
                activation: PointwiseStep | None = None, residual_last=False, returns_z=False) -> Graph:
    """y = activation(scale · conv(x, w) + bias + residual), or activation(…) + residual; with `returns_z` also z, what the activation
    is applied to. Operands: x, w, then what there is of scale, bias and residual (layouts, or None); results: y, then z."""
    builder = Builder()
    operands = [builder.operand(layout) for layout in (x, w)]
    extras = [layout and builder.operand(layout) for layout in (scale, bias, residual)]
    factor, offset, addend = extras
    z = builder.convolution(operands[0], operands[1], y, window)
    for mode, operand in (("mul", factor), ("add", offset), ("add", None if residual_last else addend)):
        z = builder.pointwise(mode, z, operand) if operand else z
    value = z
    if activation:
        value = builder.pointwise(activation.mode, value, **activation.settings)
    if residual_last and addend:
        value = builder.pointwise("add", value, addend)
    results = [(value, y.dtype), (z, y.dtype)] if returns_z else [(value, y.dtype)]
    return builder.finish([*operands, *filter(None, extras)], results)
