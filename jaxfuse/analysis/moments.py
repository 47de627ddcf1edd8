"""Which values of the program are batch statistics of another, however they are written: sums, means of means, E[x²]-E[x]²,
E[(x-E[x])²]."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jaxfuse.analysis.canonical import CAST, chosen, is_float_cast, is_long, is_square, lengths, per_channel, scale_factor, size, widens
from jaxfuse.analysis.layout import Layout, is_reshape
from jaxfuse.program.graph import Node, Value


class Reduction(NamedTuple):
    """`value` = weight · the sum over all axes of a tensor but `left`; `first` is the node that reads the tensor."""

    value: Value
    weight: float
    left: tuple[int, ...]
    first: Node


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """An axis along which this is one of several that were stacked: Flax makes one `pmean` of the mean and the mean square."""

    index: int


def views(value: Value, axis: int) -> Iterator[tuple[Value, int]]:
    """(view, its axis): the value, and its elements in another shape or a wider dtype, its `axis` one axis still."""
    stack = [(value, axis)]
    while stack:
        value, axis = stack.pop()
        yield value, axis
        for node in value.users:
            if node.primitive == CAST and widens(node) or node.primitive == "select_n" and chosen(node.out) is value:
                stack.append((node.out, axis))
            elif is_reshape(node):
                layout = Layout.of(value.shape).then(node)
                places = layout.axes(axis) if layout else None
                if places and len(places) == 1:
                    stack.append((node.out, places[0]))


def reductions(tensor: Value) -> Iterator[Reduction]:
    """Its sums over some axes, and further sums of these: under `vmap` a mean over the batch is a mean of means."""
    stack: list = [(tensor, 1.0, tuple(range(tensor.ndim)), None)]
    while stack:
        value, weight, axes, first = stack.pop()
        if first and not any(isinstance(axis, Subgraph) for axis in axes):
            yield Reduction(value, weight, tuple(axis for axis in axes if axis is not None), first)
        for node in value.users:
            factor = scale_factor(node, value) if first else None
            if node.primitive in ("reduce_sum", "psum") and all(isinstance(d, numbers.Integral) for d in node.params["axes"]):
                kept = tuple(axis for d, axis in enumerate(axes) if d not in node.params["axes"])
                stack.append((node.outputs[node.inputs.index(value)], weight, kept, first or node))
            elif factor or first and is_float_cast(node):
                stack.append((node.out, weight * (factor or 1), axes, first))
            elif first:
                stack += [(node.out, weight, moved, first) for moved in _moved(node, value, axes)]


def _moved(node: Node, value: Value, axes: tuple) -> Iterator[tuple]:
    """What the axes of `value` are in the node's output, if the node does no arithmetic: of None an axis of length 1."""
    if is_reshape(node) and lengths(node.out) == lengths(value):
        longer = iter([axis for axis, n in zip(axes, value.shape) if is_long(n)])
        yield tuple(next(longer) if is_long(n) else None for n in node.out.shape)
    elif node.primitive == "transpose":
        yield tuple(axes[d] for d in node.params["permutation"])
    elif node.primitive == "stack":
        at = node.params["axis"]
        yield from [(*axes[:at], Subgraph(i), *axes[at:]) for i, operand in enumerate(node.inputs) if operand is value]
    elif node.primitive == "slice" and node.params["strides"] is None:
        taken = list(zip(axes, node.params["start_indices"], node.params["limit_indices"], value.shape))
        if all(limit - start == n or axis == Subgraph(start) and limit - start == 1 for axis, start, limit, n in taken):
            yield tuple(None if limit - start < n else axis for axis, start, limit, n in taken)


def shared_over(tensor: Value, depth: int = 4) -> str | None:
    """The mesh axis over which its sums are summed further, at most so many steps on: a synchronised norm inside `shard_map`."""
    stack = [(reduction.value, depth) for reduction in reductions(tensor)]
    while stack:
        value, left = stack.pop()
        for node in value.users if left else ():
            names = [name for name in node.params.get("axes", ()) if isinstance(name, str)]
            if node.primitive.startswith("psum") and names:
                return names[0]
            stack += [(v, left - 1) for v in node.outputs]
    return None


class Moments:
    """The values of the program that are statistics of `x` over all axes but `axis`.

    `known` maps id(value) to (value, formula), formula(mean, var) being what the value is in terms of the two
    statistics that a kernel computes robustly; `nodes` are the full-size nodes that exist only to compute them.
    E[x²] - E[x]² is recognised as a whole, so that it is never evaluated by that subtraction.
    """

    def __init__(self, x: Value, axis: int):
        self.x, self.axis = x, axis
        self.count = size(x) // max(1, x.shape[axis])
        self.known: dict[int, tuple[Value, Callable]] = {}
        self.nodes: set[int] = set()
        self._kinds: dict[int, tuple[str, float]] = {}  # id -> what it is the mean of, times what
        self._views = list(views(x, axis))
        self._sums(self._views, "x")
        for view in self._views:
            self._squares(*view, "x²")
        self._spread()

    @property
    def means(self) -> list[Value]:
        """The values that are the mean itself."""
        return [value for value, _ in self.known.values() if self._kinds[id(value)] == ("x", 1)]

    def __bool__(self):
        return {"x", "var"} <= {kind for kind, _ in self._kinds.values()}

    def _sums(self, tensors: Iterable[tuple[Value, int]], kind) -> bool:
        """Marks the sums of the tensors over all but an axis."""
        found = [r for tensor, axis in tensors for r in reductions(tensor) if r.left == (axis,)]
        for reduction in found:
            self._mark(reduction.value, kind, reduction.weight * self.count)
            self.nodes.add(reduction.first.index)
        return bool(found)

    def _squares(self, value, axis, kind) -> None:
        for node in value.users:
            if is_square(node, value) and self._sums(views(node.out, axis), kind):
                self.nodes.add(node.index)

    def _mark(self, value, kind, weight):
        """Marks the value, what has the same numbers in another shape, and what follows by a factor that makes it a mean."""
        weight = 1.0 if abs(weight - 1) < 1e-6 else weight
        if id(value) in self._kinds:
            return
        self._kinds[id(value)] = kind, weight
        self.known[id(value)] = value, functools.partial(_moment, kind, weight)
        for node in value.users:
            factor = scale_factor(node, value)
            if is_reshape(node) or is_float_cast(node) or node.primitive == "select_n" and chosen(node.out) is value:
                self._mark(node.out, kind, weight)
            elif weight != 1 and factor:
                self._mark(node.out, kind, weight * factor)

    def _spread(self):
        """What follows from the mean: E[x²] - mean², and E[(x - mean)²]."""
        for square in [n.out for mean in self.means for n in mean.users if is_square(n, mean)]:
            for node in square.users:
                if node.primitive == "sub" and node.inputs[1] is square and self._kinds.get(id(node.inputs[0])) == ("x²", 1):
                    self._mark(node.out, "var", 1)
        for view, axis in self._views:
            for node in view.users:
                if node.primitive == "sub" and node.inputs[0] is view and self._is_mean(node.inputs[1], view, axis):
                    self._squares(node.out, axis, "var")

    def _is_mean(self, value, view, axis) -> bool:
        source = per_channel(value, view, axis)
        return isinstance(source, Value) and ("x", 1) in (self._kinds.get(id(source)), self._kinds.get(id(value)))


def _moment(kind, weight, mean, var):
    value = var + mean * mean if kind == "x²" else mean if kind == "x" else var
    return value if weight == 1 else value * weight
