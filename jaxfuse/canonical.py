"""Spellings made equal: what a value *is*, however it was written. Three questions, answered from the graph alone:

    per_channel(value, like, axis)    is this operand one number for each channel of `like`?   reshapes, broadcasts, casts
    regions(value)                    is what happens to this value one elementwise function?  then `region_table` says which
    Moments(x, axes)                  which values are batch statistics of x?                  E[x²]-E[x]², E[(x-E[x])²], ...
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.elementwise import POINTS, RULES, is_elementwise, table_of, values_of
from jaxfuse.graph import Node, Value
from jaxfuse.layout import RESHAPES, is_reshape

ADD = ("add", "add_any")
CAST = "convert_element_type"


@dataclasses.dataclass(frozen=True)
class NotPerChannel:
    reason: str


def size(value: Value) -> int:
    return int(np.prod(value.shape, dtype=np.int64))


def per_channel(value: Value, like: Value, axes: int | tuple[int, ...]) -> Value | NotPerChannel:
    """The smallest value that `value` repeats along every axis of `like` but `axes` (`[channels]` in some shape, or one
    number), or the reason why there is none. Under `vmap` the channels may be several axes, of which no one repeats."""
    axes = (axes,) if isinstance(axes, int) else axes
    channels = math.prod(like.shape[axis] for axis in axes)
    if value.ndim not in (0, like.ndim):
        return NotPerChannel(f"operand of shape {list(value.shape)} against {list(like.shape)}")
    elsewhere = varying_axes(value) - set(axes)
    if elsewhere:
        along = " and ".join(map(str, axes)) or "squeezed away"
        return NotPerChannel(f"operand {value!r} varies along axis {min(elsewhere)}, the channel axis is {along}")
    smallest, source = None, value
    while source is not None:
        smallest = source if size(source) in (1, channels) else smallest
        source = _repeated(source)
    if smallest is not None:
        return smallest
    return NotPerChannel(f"operand {value!r} is not one number for each of the {channels} channels")


def _repeated(value: Value) -> Value | None:
    """What the value repeats: through broadcasts, reshapes, widening casts, and transposes of what has one axis only."""
    node = value.producer
    if node is None or node.primitive not in (*RESHAPES, CAST, "transpose"):
        return None
    (inner,) = node.inputs
    narrowed = node.primitive == CAST and jnp.promote_types(inner.dtype, value.dtype) != value.dtype
    return None if narrowed or node.primitive == "transpose" and len(_long(value)) > 1 else inner


def repeats(value: Value) -> bool:
    """Whether it is a smaller value, broadcast."""
    return varying_axes(value) != {axis for axis, n in enumerate(value.shape) if n > 1}


def varying_axes(value: Value) -> set[int]:
    """Axes along which the value may change; broadcasts are seen through."""
    axes = {i for i, n in enumerate(value.shape) if n > 1}
    node = value.producer
    if node is None or node.primitive not in ("broadcast_in_dim", "pvary", CAST) and scaled(node) is None:
        return axes
    inner = varying_axes(node.inputs[0] if scaled(node) is None else scaled(node)[0])
    return inner if node.primitive != "broadcast_in_dim" else {node.params["broadcast_dimensions"][i] for i in inner} & axes


def scaled(node: Node) -> tuple[Value, float] | None:
    """(value, c), where the node gives value·c with a number c; a sum over no axes, as `vmap` makes of the transpose of a
    mean over the batch, is one."""
    if node.primitive == "psum" and not node.params["axes"] and len(node.inputs) == 1:
        return node.inputs[0], 1.0
    if node.primitive == "neg":
        return node.inputs[0], -1.0
    for value in node.inputs if node.primitive in ("mul", "div") else ():
        factor = scale_factor(node, value)
        if factor:
            return value, factor
    return None


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
                made[id(v)] if id(v) in made else v.literal if v.literal is not None else _number(v)
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


def constant(value: Value, depth: int = 8) -> float | None:
    """The number, if the value is one number that the program fixes: written into it, broadcast, cast, or computed from
    such numbers (jnp.var divides by `144 - ddof`) in a few steps, at most `depth` deep."""
    if value.literal is not None:
        return float(value.literal) if np.ndim(value.literal) == 0 else None
    node = value.producer
    if node is None or depth == 0:
        return None
    if node.primitive in (*RESHAPES, CAST):
        return constant(node.inputs[0], depth - 1)
    if value.shape or node.primitive not in RULES:
        return None
    operands = [constant(v, depth - 1) for v in node.inputs]
    return None if None in operands else float(RULES[node.primitive](node.params, *operands))


def region_table(region: Region) -> np.ndarray | None:
    """Value and derivative of the region's function on the points of elementwise.py."""
    return table_of(lambda x: region.replay(x, (region.end,))[0], region.start.aval)


def mask_tables(region: Region) -> tuple[np.ndarray | None, np.ndarray | None]:
    """What the masks are on the points of elementwise.py, and what they would be if they were computed from the function's
    value instead of its argument. Where both agree, as for x > 0 and relu(x) > 0, nothing needs to keep the argument."""
    start = region.start

    def of(points, wanted):
        return values_of(lambda x: region.replay(x, wanted), start.aval, points)

    ends = of(POINTS, (region.end,))
    return (None, None) if ends is None else (of(POINTS, region.masks), of(ends[0], region.masks))


def _number(value: Value):
    """A constant value of the program, varying over the axes of a `shard_map` as it does there."""
    varying = tuple(value.aval.manual_axis_type.varying)
    number = jnp.full(value.shape, constant(value), value.dtype)
    return jax.lax.pcast(number, varying, to="varying") if varying else number


# --- batch statistics --------------------------------------------------------------------------------------------


class Reduction(NamedTuple):
    """`value` = weight · the sum over all axes of a tensor but `left`; `first` is the node that reads the tensor."""

    value: Value
    weight: float
    left: tuple[int, ...]
    first: Node


class Part(NamedTuple):
    """An axis along which this is one of several that were stacked: Flax makes one `pmean` of the mean and the mean square."""

    index: int


def reductions(tensor: Value) -> Iterator[Reduction]:
    """Its sums over some axes, and further sums of these: under `vmap` a mean over the batch is a mean of means."""
    stack: list = [(tensor, 1.0, tuple(range(tensor.ndim)), None)]
    while stack:
        value, weight, axes, first = stack.pop()
        if first and not any(isinstance(axis, Part) for axis in axes):
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
    if is_reshape(node) and _long(node.out) == _long(value):
        longer = iter([axis for axis, n in zip(axes, value.shape) if n > 1])
        yield tuple(next(longer) if n > 1 else None for n in node.out.shape)
    elif node.primitive == "transpose":
        yield tuple(axes[d] for d in node.params["permutation"])
    elif node.primitive == "stack":
        at = node.params["axis"]
        yield from [(*axes[:at], Part(i), *axes[at:]) for i, operand in enumerate(node.inputs) if operand is value]
    elif node.primitive == "slice" and node.params["strides"] is None:
        taken = list(zip(axes, node.params["start_indices"], node.params["limit_indices"], value.shape))
        if all(limit - start == n or axis == Part(start) and limit - start == 1 for axis, start, limit, n in taken):
            yield tuple(None if limit - start < n else axis for axis, start, limit, n in taken)


def _long(value: Value) -> list[int]:
    return [n for n in value.shape if n > 1]


def scale_factor(node: Node, value: Value) -> float | None:
    """c, where the node is value·c or value/(1/c) with a number c."""
    if node.primitive not in ("mul", "div") or node.inputs[0] is node.inputs[1]:
        return None
    left, right = node.inputs
    number = constant(right if left is value else left)
    if not number or node.primitive == "div" and left is not value:
        return None
    return number if node.primitive == "mul" else 1 / number


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
        self._sums(x, "x")
        for full in (x, *self._casts(x)):
            self._squares(full, "x²")
        self._spread()

    @property
    def means(self) -> list[Value]:
        """The values that are the mean itself."""
        return [value for value, _ in self.known.values() if self._kinds[id(value)] == ("x", 1)]

    def __bool__(self):
        return {"x", "var"} <= {kind for kind, _ in self._kinds.values()}

    def _casts(self, value):
        for node in value.users:
            if node.primitive == CAST and jnp.promote_types(value.dtype, node.out.dtype) == node.out.dtype:
                yield node.out

    def _sums(self, full, kind) -> bool:
        """Marks the sums of `full` over the batch."""
        found = [r for tensor in (full, *self._casts(full)) for r in reductions(tensor) if r.left == (self.axis,)]
        for reduction in found:
            self._mark(reduction.value, kind, reduction.weight * self.count)
            self.nodes.add(reduction.first.index)
        return bool(found)

    def _squares(self, value, kind) -> None:
        for node in value.users:
            if is_square(node, value) and self._sums(node.out, kind):
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
            if is_reshape(node) or is_float_cast(node) or self._always_selects(node, value):
                self._mark(node.out, kind, weight)
            elif weight != 1 and factor:
                self._mark(node.out, kind, weight * factor)

    def _always_selects(self, node, value) -> bool:
        which = constant(node.inputs[0]) if node.primitive == "select_n" else None
        return which is not None and node.inputs[1 + int(which)] is value

    def _spread(self):
        """What follows from the mean: E[x²] - mean², and E[(x - mean)²]."""
        for square in [n.out for mean in self.means for n in mean.users if is_square(n, mean)]:
            for node in square.users:
                if node.primitive == "sub" and node.inputs[1] is square and self._kinds.get(id(node.inputs[0])) == ("x²", 1):
                    self._mark(node.out, "var", 1)
        for full in (self.x, *self._casts(self.x)):
            for node in full.users:
                if node.primitive == "sub" and node.inputs[0] is full and self._is_mean(node.inputs[1]):
                    self._squares(node.out, "var")

    def _is_mean(self, value) -> bool:
        source = per_channel(value, self.x, self.axis)
        return isinstance(source, Value) and ("x", 1) in (self._kinds.get(id(source)), self._kinds.get(id(value)))


def _moment(kind, weight, mean, var):
    value = var + mean * mean if kind == "x²" else mean if kind == "x" else var
    return value if weight == 1 else value * weight


def is_square(node: Node, value: Value) -> bool:
    if node.primitive == "integer_pow":
        return node.params["y"] == 2
    if node.primitive == "mul":
        return node.inputs[0] is value and node.inputs[1] is value
    return node.primitive == "square"
