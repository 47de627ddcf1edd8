"""Spellings made equal: what a value *is*, however it was written. Three questions, answered from the graph alone:

    per_channel(value, like, axis)    is this operand one number for each channel of `like`?   reshapes, broadcasts, casts
    regions(value)                    is what happens to this value one elementwise function?  then `region_table` says which
    Moments(x, axes)                  which values are batch statistics of x?                  E[x²]-E[x]², E[(x-E[x])²], ...
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxfuse.elementwise import POINTS, RULES, is_elementwise, table_of, values_of
from jaxfuse.graph import Node, Value

ADD = ("add", "add_any")
RESHAPED = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy")
CAST = "convert_element_type"


@dataclasses.dataclass(frozen=True)
class NotPerChannel:
    reason: str


def size(value: Value) -> int:
    return int(np.prod(value.shape, dtype=np.int64))


def per_channel(value: Value, like: Value, axis: int) -> Value | NotPerChannel:
    """The smallest value that `value` repeats along every axis of `like` but `axis` (`[channels]` in some shape, or one
    number), or the reason why there is none."""
    channels = like.shape[axis]
    if value.ndim not in (0, like.ndim):
        return NotPerChannel(f"operand of shape {list(value.shape)} against {list(like.shape)}")
    elsewhere = _varying_axes(value) - {axis}
    if elsewhere:
        return NotPerChannel(f"operand {value!r} varies along axis {min(elsewhere)}, the channel axis is {axis}")
    while value.producer is not None and value.producer.primitive in (*RESHAPED, CAST):
        inner = value.producer.inputs[0]
        narrowed = value.producer.primitive == CAST and jnp.promote_types(inner.dtype, value.dtype) != value.dtype
        if narrowed or size(inner) not in (1, channels):
            break
        value = inner
    if size(value) in (1, channels):
        return value
    return NotPerChannel(f"operand {value!r} is not one number for each of the {channels} channels")


def _varying_axes(value: Value) -> set[int]:
    """Axes along which the value may change; broadcasts are seen through."""
    axes = {i for i, n in enumerate(value.shape) if n > 1}
    node = value.producer
    if node is None or node.primitive not in ("broadcast_in_dim", CAST):
        return axes
    inner = _varying_axes(node.inputs[0])
    return inner if node.primitive == CAST else {node.params["broadcast_dimensions"][i] for i in inner} & axes


# --- elementwise functions ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Region:
    """The elementwise function that `nodes` compute from `start` alone. Of them only `end` is read outside, and `masks`,
    comparisons that autodiff keeps of it."""

    start: Value
    end: Value
    nodes: tuple[Node, ...]
    masks: tuple[Value, ...] = ()

    def replay(self, array, wanted: tuple[Value, ...]) -> list:
        """The wanted values for another array in place of `start`."""
        made = {id(self.start): array}
        for node in self.nodes:
            inputs = [
                made[id(v)] if id(v) in made else v.literal if v.literal is not None else jnp.full(v.shape, constant(v), v.dtype)
                for v in node.inputs
            ]
            (made[id(node.out)],) = node.replay(inputs)
        return [made[id(v)] for v in wanted]


LONGEST_FUNCTION = 24  # nodes; jax.nn.gelu with tanh is 8, mish by hand 10


def regions(start: Value, is_returned: Callable[[Value], bool]) -> list[Region]:
    """Every region that starts here, shortest first."""
    inside: dict[int, Node] = {}
    values = {id(start): start}
    found, frontier = [], {n.index: n for n in start.users}
    while frontier and len(inside) < LONGEST_FUNCTION:
        node = frontier.pop(min(frontier))
        if is_float_cast(node):  # a step of its own: dtypes decide how far a kernel may go
            continue
        if not (is_elementwise(node) and all(id(v) in values or constant(v) is not None for v in node.inputs)):
            continue
        inside[node.index] = node
        values[id(node.out)] = node.out
        frontier |= {n.index: n for n in node.out.users if n.index not in inside}
        read = [v for v in values.values() if is_returned(v) or any(n.index not in inside for n in v.users)]
        masks = tuple(v for v in read if v.dtype == bool and not is_returned(v))
        ends = [v for v in read if v not in masks]
        if len(ends) == 1 and ends[0] is not start and jnp.issubdtype(ends[0].dtype, jnp.floating):
            found.append(Region(start, ends[0], tuple(inside[i] for i in sorted(inside)), masks))
    return found


def is_float_cast(node: Node) -> bool:
    return node.primitive == CAST and all(jnp.issubdtype(v.dtype, jnp.floating) for v in (node.inputs[0], node.out))


def constant(value: Value) -> float | None:
    """The number, if the value is one number that the program fixes: written into it, broadcast, cast, or computed from
    such numbers (jnp.var divides by `144 - ddof`)."""
    if value.literal is not None:
        return float(value.literal) if np.ndim(value.literal) == 0 else None
    node = value.producer
    if node is None:
        return None
    if node.primitive in (*RESHAPED, CAST):
        return constant(node.inputs[0])
    if value.shape or node.primitive not in RULES:
        return None
    operands = [constant(v) for v in node.inputs]
    return None if None in operands else float(RULES[node.primitive](node.params, *operands))


def region_table(region: Region) -> np.ndarray | None:
    """Value and derivative of the region's function on the points of elementwise.py."""
    return table_of(lambda x: region.replay(x, (region.end,))[0], region.start.shape, region.start.dtype)


def served_from_end(region: Region) -> bool:
    """Whether the masks come out the same if they are computed from the function's value instead of its argument, as
    x > 0 does from relu(x): then nothing needs to keep the argument."""
    start = region.start

    def of(points, wanted):
        return values_of(lambda x: region.replay(x, wanted), start.shape, start.dtype, points)

    ends = of(POINTS, (region.end,))
    return ends is not None and np.array_equal(of(POINTS, region.masks), of(ends[0], region.masks))


# --- batch statistics --------------------------------------------------------------------------------------------


class Moments:
    """The values of the program that are statistics of `x` over all axes but `axis`.

    `known` maps id(value) to (value, formula), formula(mean, var, count) being what the value is in terms of the two
    statistics that a kernel computes robustly; `nodes` are the full-size nodes that exist only to compute them.
    E[x²] - E[x]² is recognised as a whole, so that it is never evaluated by that subtraction.
    """

    def __init__(self, x: Value, axis: int):
        self.x, self.axis = x, axis
        self.axes = tuple(d for d in range(x.ndim) if d != axis)
        self.count = size(x) // max(1, x.shape[axis])
        self.known: dict[int, tuple[Value, Callable]] = {}
        self.kinds: dict[int, str] = {}
        self.nodes: set[int] = set()
        self._sums(x, "sum")
        self._squares(x, "sum_sq")
        for cast in self._casts(x):
            self._sums(cast, "sum")
            self._squares(cast, "sum_sq")
        self._spread()

    def __bool__(self):
        return "mean" in self.kinds.values() and "var" in self.kinds.values()

    def _casts(self, value):
        for node in value.users:
            if node.primitive == CAST and jnp.promote_types(value.dtype, node.out.dtype) == node.out.dtype:
                yield node.out

    def _sums(self, value, kind) -> bool:
        """Marks the sums of `value` over the batch."""
        found = False
        for node in value.users:
            if node.primitive == "reduce_sum" and tuple(sorted(node.params["axes"])) == self.axes:
                self._mark(node.out, kind)
                self.nodes.add(node.index)
                found = True
        return found

    def _squares(self, value, kind) -> None:
        for node in value.users:
            if is_square(node, value) and self._sums(node.out, kind):
                self.nodes.add(node.index)

    def _mark(self, value, kind):
        """Marks the value, what has the same numbers in another shape, and what follows by a division by the count."""
        if id(value) in self.kinds:
            return
        self.kinds[id(value)] = kind
        self.known[id(value)] = value, FORMULAS[kind]
        for node in value.users:
            if node.primitive in RESHAPED and size(node.out) == size(value):
                self._mark(node.out, kind)
            elif node.primitive == "select_n" and self._always_selects(node, value):
                self._mark(node.out, kind)
            elif kind in PER_COUNT and self._divides_by_count(node, value):
                self._mark(node.out, PER_COUNT[kind])

    def _always_selects(self, node, value) -> bool:
        which = constant(node.inputs[0])
        return which is not None and node.inputs[1 + int(which)] is value

    def _divides_by_count(self, node, value) -> bool:
        if node.primitive == "div" and node.inputs[0] is value:
            return constant(node.inputs[1]) == self.count
        if node.primitive == "mul":
            factor = next((constant(v) for v in node.inputs if v is not value), None)
            return factor is not None and abs(factor * self.count - 1) < 1e-6
        return False

    def _spread(self):
        """What follows from the mean: E[x²] - mean², and E[(x - mean)²]."""
        means = [v for v, _ in list(self.known.values()) if self.kinds[id(v)] == "mean"]
        squared = [n.out for mean in means for n in mean.users if is_square(n, mean)]
        for square in squared:
            for node in square.users:
                if node.primitive == "sub" and node.inputs[1] is square and self.kinds.get(id(node.inputs[0])) == "mean_sq":
                    self._mark(node.out, "var")
        for full in (self.x, *self._casts(self.x)):
            for node in full.users:
                if node.primitive == "sub" and node.inputs[0] is full and self._is_mean(node.inputs[1]):
                    self._squares(node.out, "sum_dev")

    def _is_mean(self, value) -> bool:
        source = per_channel(value, self.x, self.axis)
        return isinstance(source, Value) and (self.kinds.get(id(source)) == "mean" or self.kinds.get(id(value)) == "mean")


# kind -> its value from (mean, var, count)
FORMULAS = {
    "sum": lambda mean, var, count: mean * count,
    "sum_sq": lambda mean, var, count: (var + mean * mean) * count,
    "sum_dev": lambda mean, var, count: var * count,
    "mean": lambda mean, var, count: mean,
    "mean_sq": lambda mean, var, count: var + mean * mean,
    "var": lambda mean, var, count: var,
}
PER_COUNT = {"sum": "mean", "sum_sq": "mean_sq", "sum_dev": "var"}


def is_square(node: Node, value: Value) -> bool:
    if node.primitive == "integer_pow":
        return node.params["y"] == 2
    if node.primitive == "mul":
        return node.inputs[0] is value and node.inputs[1] is value
    return node.primitive == "square"
