"""Where the elements of a value are after transposes and reshapes, which move data but compute nothing.

`jax.vmap`, `squeeze` and NCHW-to-NHWC transposes put such steps between a convolution and what belongs to it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.extend import source_info_util

from jaxfuse.analysis.axes import IndexMap, merged
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.runtime import private

RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "pvary")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A value that has the elements of its origin, each once: the origin's axes in another order, split or merged."""

    origin: tuple[int, ...]
    places: IndexMap

    @classmethod
    def of(cls, shape) -> "Layout":
        return cls(tuple(shape), IndexMap.of(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.places.shape

    @functools.cached_property
    def permutation(self) -> tuple[int, ...] | None:
        """The order in which the origin's axes lie, though they may be merged; None if one was split. Axes of length 1 that a
        reshape left out stay in order."""
        order: list[int] = []
        for digit in self._digits:
            axes = self._axes_of(digit, order)
            if axes is None:
                return None
            order += axes
        for d in range(len(self.origin)):
            if d not in order:
                order.insert(next((i for i, other in enumerate(order) if other > d), len(order)), d)
        return tuple(order)

    @property
    def _digits(self) -> list[tuple[int, int]]:
        return [digit for run in self.places.runs for digit in run]

    def _axes_of(self, digit: tuple[int, int], taken: list[int]) -> list[int] | None:
        """The axes of the origin that together are this digit; None if it ends inside of one."""
        own = [digit for (digit,) in IndexMap.of(self.origin).runs]
        if digit[1] == 1:
            return [next(d for d, other in enumerate(own) if other == digit and d not in taken)]
        axes: list[int] = []
        stride, end = digit[0], digit[0] * digit[1]
        while end != stride:
            axis = next((d for d, (low, n) in enumerate(own) if n != 1 and low * n == end), None)
            if axis is None:
                return None
            axes.append(axis)
            end = own[axis][0]
        return axes

    @property
    def is_permutation(self) -> bool:
        """Whether it is the origin with its axes in another order, or in the same."""
        return self.permutation is not None and self.shape == tuple(self.origin[d] for d in self.permutation)

    @property
    def is_identity(self) -> bool:
        """Whether it is the origin itself."""
        return self.shape == self.origin and self.axis_order == tuple(range(len(self.origin))) and self.is_permutation

    @property
    def axis_order(self) -> tuple[int, ...]:
        """The order in which the origin's axes lie in `shape`, as far as an op can write them so."""
        return self.permutation or tuple(range(len(self.origin)))

    def then(self, node: Node) -> "Layout | None":
        """The layout of the node's output, if the node only moves elements and the result can be told in this form."""
        moved = self.places.then(node) if node.primitive == "transpose" or is_reshape(node) else None
        return None if moved is None else Layout(self.origin, moved)

    def axes(self, axis: int) -> tuple[int, ...] | None:
        """The axes of `shape` that together are the origin's `axis`, in order; None if others are merged with it."""
        if self.is_permutation:
            return (self.axis_order.index(axis),)
        ((stride, n),) = IndexMap.of(self.origin).runs[axis]
        if n == 1:
            return ()
        found = [d for d, run in enumerate(self.places.runs) if any(_overlap(digit, (stride, n)) for digit in run)]
        whole = merged(digit for d in found for digit in self.places.runs[d])
        return tuple(found) if whole == merged([(stride, n)]) else None

    def place(self, array, order=None):
        """The array in this layout; it is given as the origin with its axes in that order."""
        own = range(len(self.origin))
        if self.permutation is not None:
            return _permute(array, order or own, self.permutation).reshape(self.shape)
        pieces, places = self._pieces()
        return _permute(_permute(array, order or own, own).reshape(pieces), range(len(pieces)), places).reshape(self.shape)

    def undo(self, array, order):
        """`place` backwards."""
        if self.permutation is not None:
            return _permute(array.reshape([self.origin[d] for d in self.permutation]), self.permutation, order)
        pieces, places = self._pieces()
        whole = _permute(array.reshape([pieces[d] for d in places]), places, range(len(pieces))).reshape(self.origin)
        return _permute(whole, range(len(self.origin)), order)

    def _pieces(self) -> tuple[list[int], list[int]]:
        """The lengths of the digits as the origin has them, and the order in which they lie."""
        digits = [digit for digit in self._digits if digit[1] != 1]
        own = sorted(digits, key=lambda digit: -private.known(digit[0]))
        return [n for _, n in own], [own.index(digit) for digit in digits]


def _overlap(digit: tuple[int, int], axis: tuple[int, int]) -> bool:
    low, high, start, end = map(private.known, (digit[0], digit[0] * digit[1], axis[0], axis[0] * axis[1]))
    return low < end and start < high


def _permute(array, given, wanted):
    order = [list(given).index(d) for d in wanted]
    return array if order == sorted(order) else lax.transpose(array, order)


def is_reshape(node: Node) -> bool:
    """Same elements in the same order under another shape."""
    if node.primitive not in RESHAPES or node.inputs[0].literal is not None or len(node.inputs) != 1:
        return False
    plain = node.params.get("dimensions") is None or node.primitive != "reshape"
    return plain and node.params.get("sharding") is None and math.prod(node.inputs[0].shape) == math.prod(node.out.shape)


def only_moved(value: Value) -> tuple[Value, tuple[int, ...]]:
    """(source, permutation): the furthest value that `value` is a mere transpose of, reshapes undone."""
    path: list[Node] = []
    best = value, tuple(range(value.ndim))
    while value.producer is not None and (is_reshape(value.producer) or value.producer.primitive == "transpose"):
        path.insert(0, value.producer)
        value = value.producer.inputs[0]
        layout: Layout | None = Layout.of(value.shape)
        for node in path:
            layout = layout and layout.then(node)
        if layout and layout.is_permutation:
            best = value, layout.axis_order
    return best


def in_place(value: Value) -> Value:
    """The furthest value whose elements lie as they do in `value`, in the same shape."""
    source, order = only_moved(value)
    return source if source.shape == value.shape and order == tuple(sorted(order)) else value


def transposed(graph: Graph, value: Value, order: tuple[int, ...]) -> Value:
    """`value` with its axes in that order, as one more value of the program: a match may define it together with `value`;
    where none does, it is computed from `value`. So what one fused op gives channels-last, another reads channels-last."""
    if order == tuple(range(value.ndim)):
        return value
    key = id(value), order
    if key not in graph.transposes:
        closed = jax.make_jaxpr(lambda array: lax.transpose(array, order))(jax.ShapeDtypeStruct(value.shape, value.dtype))
        name_stack = value.producer.name_stack if value.producer else source_info_util.new_name_stack()
        node = Node(closed.jaxpr.eqns[0], -1, [value], name_stack)
        value.users.remove(node)  # the program's own readers decide what may be fused
        graph.transposes[key] = node.out
    return graph.transposes[key]


def to_layout(graph: Graph, value: Value, layout: Layout, permutation) -> tuple[Value, Callable]:
    """(read, made): the value to read, and what makes of its array `value` in the origin's shape, axes in that order."""
    if layout.is_permutation:
        return transposed(graph, value, tuple(layout.axis_order.index(d) for d in permutation)), lambda array: array
    return value, lambda array: layout.undo(array, permutation)


def channels_last(ndim: int, axis: int) -> tuple[int, ...]:
    return (*[d for d in range(ndim) if d != axis], axis)


def inverse(permutation) -> tuple[int, ...]:
    return tuple(map(int, np.argsort(permutation)))
