"""Where the elements of a value are after transposes and reshapes, which move data but compute nothing.

`jax.vmap`, `squeeze` and NCHW-to-NHWC transposes put such steps between a convolution and what belongs to it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Self

import numpy as np
from jax import lax

from jaxfuse.analysis.axes import IndexMap, SubAxes, is_long
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.transposes import transposed
from jaxfuse.runtime import private

RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "pvary")


@dataclasses.dataclass(frozen=True)
class Layout(IndexMap):
    """A value that has the elements of its origin, each once: an index map that repeats nothing, whose sub-axes begin with the axis of
    the origin that they are of. So they are the origin's axes in another order, split or merged."""

    origin: tuple[int, ...]

    @classmethod
    def of(cls, shape) -> "Layout":
        return cls(tuple(((axis, *whole),) for axis, (whole,) in enumerate(IndexMap.of(shape).sub_axes)), tuple(shape))

    @property
    def in_order(self) -> SubAxes:
        """The sub-axes of all axes."""
        return tuple(itertools.chain.from_iterable(self.sub_axes))

    def then(self, node: Node) -> Self | None:
        """The layout of the node's output, if the node only moves elements and the result can be expressed in this form: no axis may end
        inside a part of one, as [6] of [2, 3] does where it is [3, 2]."""
        if is_reshape(node):
            return self if node.out.shape == self.shape else self.reshaped(node.out.shape)
        return super().then(node) if node.primitive == "transpose" else None

    @functools.cached_property
    def axis_order(self) -> tuple[int, ...]:
        """The order in which the origin's axes lie in `shape`, though some may be merged; as they were where one is split. Those of
        length 1 that a reshape left out stay where they were."""
        order = [axis for axis, _, _ in self.in_order]
        for axis in range(len(self.origin)):
            if axis not in order:
                order.insert(next((i for i, other in enumerate(order) if other > axis), len(order)), axis)
        return tuple(order if len(order) == len(self.origin) else range(len(self.origin)))

    @property
    def is_permutation(self) -> bool:
        """Whether it is the origin with its axes in another order, or in the same."""
        axes = [axis for axis, _, _ in self.in_order]
        return len(set(axes)) == len(axes) and self.shape == tuple(self.origin[d] for d in self.axis_order)

    @property
    def is_identity(self) -> bool:
        return self.is_permutation and self.axis_order == tuple(range(len(self.origin)))

    def axes(self, *axes: int) -> tuple[int, ...] | None:
        """The axes of `shape` that together are these of the origin, in their order; None if others are merged with them."""
        if self.is_permutation:
            found = tuple(self.axis_order.index(axis) for axis in axes)
            return found if found == tuple(sorted(found)) else None
        of_axes = [d for d, parts in enumerate(self.sub_axes) if any(axis in axes and is_long(n) for axis, _, n in parts)]
        own = [sub_axis for d in of_axes for sub_axis in self.sub_axes[d]]
        if any(axis not in axes for axis, _, _ in own):
            return None
        order = [(axes.index(axis), -private.known(stride)) for axis, stride, _ in own]
        return tuple(of_axes) if order == sorted(order) else None

    def place(self, array, order=None):
        """The array in this layout; it is given as the origin with its axes in that order."""
        return _permuted(array, self._given(order or range(len(self.origin))), self.in_order).reshape(self.shape)

    def undo(self, array, order):
        """`place` backwards."""
        return _permuted(array, self.in_order, self._given(order)).reshape([self.origin[d] for d in order])

    def _given(self, order) -> SubAxes:
        """All sub-axes as they lie in the origin with its axes in that order."""
        return tuple(sorted(self.in_order, key=lambda sub_axis: (list(order).index(sub_axis[0]), -private.known(sub_axis[1]))))


def _permuted(array, given: SubAxes, wanted: SubAxes):
    split, order = array.reshape([n for _, _, n in given]), [given.index(sub_axis) for sub_axis in wanted]
    return split if order == sorted(order) else lax.transpose(split, order)


def is_reshape(node: Node) -> bool:
    """Same elements in the same order under another shape."""
    if node.primitive not in RESHAPES or node.inputs[0].literal is not None or len(node.inputs) != 1:
        return False
    return node.params.get("sharding") is None and math.prod(node.inputs[0].shape) == math.prod(node.out.shape)


def moves(node: Node) -> bool:
    """Same elements in another order, or under another shape."""
    return node.primitive == "transpose" or is_reshape(node)


def only_moved(value: Value) -> tuple[Value, tuple[int, ...]]:
    """(source, permutation): the furthest value that `value` is a mere transpose of, reshapes undone."""
    path: list[Node] = []
    best = value, tuple(range(value.ndim))
    while value.producer is not None and moves(value.producer):
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


def views_of(value: Value) -> list[Value]:
    """The array that the value is, and all that are the same by reshapes: one buffer."""
    while value.producer is not None and is_reshape(value.producer):
        value = value.producer.inputs[0]
    found = [value]
    for view in found:
        found += [user.out for user in view.users if isinstance(user, Node) and is_reshape(user)]
    return found


def to_layout(graph: Graph, value: Value, layout: Layout, permutation) -> tuple[Value, Callable]:
    """(read, made): the value to read, and what makes of its array `value` in the origin's shape, axes in that order."""
    if layout.is_permutation:
        return transposed(graph, value, tuple(layout.axis_order.index(d) for d in permutation)), lambda array: array
    return value, lambda array: layout.undo(array, permutation)


def channels_last(ndim: int, axis: int) -> tuple[int, ...]:
    return (*[d for d in range(ndim) if d != axis], axis)


def inverse(permutation) -> tuple[int, ...]:
    return tuple(map(int, np.argsort(permutation)))
