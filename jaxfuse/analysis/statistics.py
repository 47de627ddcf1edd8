"""Which values of the program are statistics of another over some of its axes, however they are written: sums, means of means,
E[x²]-E[x]², E[(x-E[x])²]. A batch norm keeps the channels' axis, a norm of rows those before the row."""

import enum
import math
import numbers
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxfuse.analysis.axes import IndexMap, merged
from jaxfuse.analysis.canonical import CAST, chosen, constant, is_float_cast, is_square, per_channel, scale_factor, unwidened, widens
from jaxfuse.analysis.layout import RESHAPES, Layout, is_reshape
from jaxfuse.program.graph import Node, Value

# --- sums of squares ---------------------------------------------------------------------------------------------


class Square(NamedTuple):
    """A value that is base², but for casts that widen it; `masked`: 0 where a mask, which is data, says so. The base is `minuend`
    less something, or None: a mean where `is_deviation`."""

    base: Value
    minuend: Value | None
    is_deviation: bool
    masked: bool


def square(value: Value) -> Square | None:
    whole = unmasked(value)
    node = whole.producer
    if node is None or not node.inputs or not is_square(node, node.inputs[0]):
        return None
    base, masked = narrowest(node.inputs[0]), whole is not narrowest(value)
    if base.producer is None or base.producer.primitive != "sub":
        return Square(base, None, False, masked)
    left, right = base.producer.inputs
    return Square(base, narrowest(left), _is_mean(right), masked)


def unmasked(value: Value) -> Value:
    """What statistics with a mask are of: select(mask, x, 0)."""
    value = narrowest(value)
    node = value.producer
    if node is not None and node.primitive == "select_n" and len(node.inputs) == 3:
        for zero, kept in (node.inputs[1:], node.inputs[:0:-1]):
            if constant(zero) == 0 and constant(kept) is None:
                return narrowest(kept)
    return value


def narrowest(value: Value) -> Value:
    """What widening casts were made of."""
    while (inner := unwidened(value)) is not value:
        value = inner
    return value


def _is_mean(value: Value) -> bool:
    """Whether the value is a sum over some axes, divided."""
    while value.producer is not None and value.producer.primitive in (*RESHAPES, "transpose", CAST, "div", "mul"):
        value = value.producer.inputs[0]
    return value.producer is not None and value.producer.primitive == "reduce_sum"


# --- sums --------------------------------------------------------------------------------------------------------


class Reduction(NamedTuple):
    """`value` = weight · the sum of a tensor over the axes that its index map `places` has no more; `first` is the node that reads
    the tensor."""

    value: Value
    weight: float
    places: IndexMap
    first: Node

    def left(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a tensor of this shape that it was not summed over."""
        runs, left = list(self.places.runs), []
        for d, run in reversed([*enumerate(IndexMap.of(shape).runs)]):
            if run in runs:
                runs.remove(run)
                left.append(d)
        return tuple(left[::-1])


def reductions(tensor: Value, places: IndexMap) -> Iterator[Reduction]:
    """Its sums over some axes, and further sums of these: under `vmap` a mean over the batch is a mean of means."""
    stack: list[tuple[Value, float, IndexMap, Node | None]] = [(tensor, 1.0, places, None)]
    while stack:
        value, weight, places, first = stack.pop()
        if first and not places.is_stacked:
            yield Reduction(value, weight, places, first)
        for node in value.users:
            factor = scale_factor(node, value) if first else None
            if _is_sum(node):
                total = node.outputs[node.inputs.index(value)]
                stack.append((total, weight, places.without(node.params["axes"]), first or node))
            elif factor or first and is_float_cast(node):
                stack.append((node.out, weight * (factor or 1), places, first))
            elif first:
                stack += [(node.out, weight, moved, first) for moved in _moved(node, value, places)]


def _is_sum(node: Node) -> bool:
    """Over axes of its operands, not over those of a mesh, which have names."""
    return node.primitive in ("reduce_sum", "psum") and all(isinstance(axis, numbers.Integral) for axis in node.params["axes"])


def _moved(node: Node, value: Value, places: IndexMap) -> Iterator[IndexMap]:
    """Where the elements of `value` are in the node's output, if the node does no arithmetic."""
    if node.primitive == "stack":  # Flax makes one `pmean` of the mean and the mean square
        axis, count = node.params["axis"], len(node.inputs)
        yield from [places.stacked(axis, i, count) for i, operand in enumerate(node.inputs) if operand is value]
    elif node.primitive in ("transpose", "slice") or is_reshape(node):
        moved = places.then(node)
        if moved is not None:
            yield moved


def shared_over(tensor: Value, depth: int = 4) -> str | None:
    """The mesh axis over which its sums are summed further, at most so many steps on: a synchronised norm inside `shard_map`."""
    stack = [(reduction.value, depth) for reduction in reductions(tensor, IndexMap.of(tensor.shape))]
    while stack:
        value, left = stack.pop()
        for node in value.users if left else ():
            names = [name for name in node.params.get("axes", ()) if isinstance(name, str)]
            if node.primitive.startswith("psum") and names:
                return names[0]
            stack += [(v, left - 1) for v in node.outputs]
    return None


# --- statistics --------------------------------------------------------------------------------------------------


def views(value: Value, axes: tuple[int, ...], layout: Layout | None = None) -> Iterator[tuple[Value, Layout]]:
    """(view, how it lies): the value, and its elements in another shape or a wider dtype, where each of its `axes` is one axis still."""
    stack = [(value, layout or Layout.of(value.shape))]
    while stack:
        value, layout = stack.pop()
        yield value, layout
        for node in value.users:
            if node.primitive == CAST and widens(node) or node.primitive == "select_n" and chosen(node.out) is value:
                stack.append((node.out, layout))
            elif is_reshape(node):
                moved = layout.then(node)
                if moved and all(len(moved.axes(axis) or ()) == 1 for axis in axes):
                    stack.append((node.out, moved))


class Kind(enum.Enum):
    MEAN = enum.auto()  # E[x]
    SQUARES = enum.auto()  # E[x²]
    VARIANCE = enum.auto()  # E[(x - E[x])²]


class Moment(NamedTuple):
    """weight · that of the kind"""

    kind: Kind
    weight: float = 1.0

    def of(self, mean, var):
        """In terms of the two statistics that a kernel computes robustly: E[x²] - E[x]² is never evaluated by that subtraction."""
        value = mean if self.kind is Kind.MEAN else var if self.kind is Kind.VARIANCE else var + mean * mean
        return value if self.weight == 1 else value * self.weight


class Statistics:
    """The values of the program that are statistics of `x` over all axes but those that are `kept`.

    `known` says of each what it is, `places` which rows its elements are of; `nodes` are the full-size nodes that exist only to
    compute them. `seen` are the values that have the elements of x, by default those made of it.
    """

    def __init__(self, x: Value, kept: tuple[int, ...], seen: Iterable[tuple[Value, Layout]] = ()):
        self.x, self.kept = x, kept
        self.count = math.prod(n for axis, n in enumerate(x.shape) if axis not in kept)
        self.known: dict[Value, Moment] = {}
        self.places: dict[Value, IndexMap] = {}
        self.nodes: set[int] = set()
        self._run = merged(digit for axis in kept for digit in IndexMap.of(x.shape).runs[axis])
        self._views = list(seen) or list(views(x, kept))
        for view, layout in self._views:
            self._sums(view, layout, Kind.MEAN)
        for view, layout in self._views:
            self._squares(view, layout, Kind.SQUARES)
        self._spread()

    @property
    def axis(self) -> int:
        """The one axis that is kept: a batch norm's channels."""
        (axis,) = self.kept
        return axis

    @property
    def means(self) -> list[Value]:
        """The values that are the mean itself."""
        return [value for value, moment in self.known.items() if moment == Moment(Kind.MEAN)]

    def __bool__(self):
        return {Kind.MEAN, Kind.VARIANCE} <= {moment.kind for moment in self.known.values()}

    @property
    def since(self) -> int:
        """The index of the first node that computes one of them."""
        return min(value.producer.index for value in self.known if value.producer)

    def _sums(self, tensor: Value, layout: Layout, kind: Kind) -> bool:
        """Marks the sums of the tensor over all but the kept axes."""
        found = [r for r in reductions(tensor, layout.places) if r.places.flat == self._run]
        for reduction in found:
            self._mark(reduction.value, Moment(kind, reduction.weight * self.count), reduction.places)
            self.nodes.add(reduction.first.index)
        return bool(found)

    def _squares(self, value: Value, layout: Layout, kind: Kind):
        for node in value.users:
            if is_square(node, value):
                if any([self._sums(view, lies, kind) for view, lies in views(node.out, self.kept, layout)]):
                    self.nodes.add(node.index)

    def _mark(self, value: Value, moment: Moment, places: IndexMap | None):
        """Marks the value, what has the same numbers in another shape, and what follows by a factor that makes it a mean."""
        if value in self.known or places is None:
            return
        weight = 1.0 if abs(moment.weight - 1) < 1e-6 else moment.weight
        self.known[value], self.places[value] = moment._replace(weight=weight), places
        for node in value.users:
            factor = scale_factor(node, value)
            if is_reshape(node):
                self._mark(node.out, self.known[value], places.then(node))
            elif is_float_cast(node) or node.primitive == "select_n" and chosen(node.out) is value:
                self._mark(node.out, self.known[value], places)
            elif weight != 1 and factor:
                self._mark(node.out, moment._replace(weight=weight * factor), places)

    def _spread(self):
        """What follows from the mean: E[x²] - mean², and E[(x - mean)²]."""
        for squared in [n.out for mean in self.means for n in mean.users if is_square(n, mean)]:
            for node in squared.users:
                left = node.inputs[0]
                if node.primitive == "sub" and node.inputs[1] is squared and self.known.get(left) == Moment(Kind.SQUARES):
                    self._mark(node.out, Moment(Kind.VARIANCE), self.places[left])
        for view, layout in self._views:
            for node in view.users:
                if node.primitive == "sub" and node.inputs[0] is view and self._is_mean(node.inputs[1], view, layout):
                    self._squares(node.out, layout, Kind.VARIANCE)

    def _is_mean(self, value: Value, view: Value, layout: Layout) -> bool:
        axes = tuple(d for axis in self.kept for d in layout.axes(axis) or ())
        source = per_channel(value, view, axes)
        return isinstance(source, Value) and Moment(Kind.MEAN) in (self.known.get(source), self.known.get(value))
