"""Where the elements of a value are after transposes and reshapes, which move data but compute nothing.

`jax.vmap`, `squeeze` and NCHW-to-NHWC transposes put such steps between a convolution and what belongs to it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax import lax
from jax.extend import source_info_util

from jaxfuse.program.graph import Graph, Node, Value

RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "pvary")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A value as `origin.reshape(factors).transpose(permutation).reshape(shape)`. Each factor is (axis of the origin,
    length): the origin's axes themselves, or pieces of them, as `vmap` over the weights of a convolution makes."""

    origin: tuple[int, ...]
    factors: tuple[tuple[int, int], ...]
    permutation: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shape) -> "Layout":
        shape = tuple(shape)
        return cls(shape, tuple(enumerate(shape)), tuple(range(len(shape))), shape)

    @property
    def transposed(self) -> tuple[int, ...]:
        return tuple(self.factors[i][1] for i in self.permutation)

    @property
    def is_permutation(self) -> bool:
        """Whether it is the origin with its axes in another order, or in the same."""
        return self.shape == self.transposed and not self._is_split

    @property
    def axis_order(self) -> tuple[int, ...]:
        """The order in which the origin's axes lie in `shape`, as far as an op can write them so."""
        return tuple(range(len(self.origin))) if self._is_split else self.permutation

    @property
    def _is_split(self) -> bool:
        return len(self.factors) != len(self.origin)

    def then(self, node: Node) -> "Layout | None":
        """The layout of the node's output, if the node only moves elements and the result can be told in this form."""
        shape = tuple(node.out.shape)
        if is_reshape(node):
            return dataclasses.replace(self, shape=shape)
        if node.primitive == "transpose":
            split = self if self.shape == self.transposed else self._split()
            permutation = split._then_permuted(node.params["permutation"])
            return dataclasses.replace(split, permutation=permutation, shape=shape) if permutation else None
        return None

    def _split(self) -> "Layout":
        """The same with every factor that the last reshape splits as the pieces."""
        pieces = {i: [length] for i, (_, length) in enumerate(self.factors)}
        for merged, split in _blocks(self.transposed, self.shape):
            if len(merged) == 1 < len(split):
                pieces[self.permutation[merged[0]]] = [self.shape[d] for d in split]
        factors = [(self.factors[i][0], length) for i, lengths in pieces.items() for length in lengths]
        starts = list(itertools.accumulate(map(len, pieces.values()), initial=0))
        permutation = [starts[i] + k for i in self.permutation for k in range(len(pieces[i]))]
        return dataclasses.replace(self, factors=tuple(factors), permutation=tuple(permutation))

    def _then_permuted(self, order) -> tuple[int, ...] | None:
        """The permutation after axes of `shape` were put into `order`: factors that were merged move as one."""
        if self.shape == self.transposed:
            return tuple(self.permutation[d] for d in order)
        blocks = list(_blocks(self.transposed, self.shape))
        block_of = {d: i for i, (_, split) in enumerate(blocks) for d in split}
        moved = [d for d in order if self.shape[d] != 1]
        sequence = list(dict.fromkeys(block_of[d] for d in moved))
        if moved != [d for i in sequence for d in blocks[i][1]]:
            return None
        merged = [self.permutation[d] for i in sequence for d in blocks[i][0]]
        return (*[i for i in self.permutation if i not in merged], *merged)  # factors of length 1 go anywhere

    def axes(self, axis: int) -> tuple[int, ...] | None:
        """The axes of `shape` that together are the origin's `axis`, in order; None if others are merged with it."""
        places = [self.permutation.index(i) for i, (own, _) in enumerate(self.factors) if own == axis]
        if self.shape != self.transposed:
            split_of = {merged: split for merged, split in _blocks(self.transposed, self.shape)}
            places = [place for place in places if self.transposed[place] != 1]
            if any((place,) not in split_of for place in places):
                return None
            places = [d for place in places for d in split_of[place,]]
        return tuple(places) if places == sorted(places) else None

    def place(self, array, order=None):
        """The array in this layout; it is given as the origin with its axes in that order."""
        own = range(len(self.origin))
        if not self._is_split:
            return _permute(array, order or own, self.permutation).reshape(self.shape)
        pieces = _permute(array, order or own, own).reshape([length for _, length in self.factors])
        return lax.transpose(pieces, self.permutation).reshape(self.shape)

    def undo(self, array, order):
        """`place` backwards."""
        array, own = array.reshape(self.transposed), range(len(self.origin))
        if not self._is_split:
            return _permute(array, self.permutation, order)
        return _permute(lax.transpose(array, inverse(self.permutation)).reshape(self.origin), own, order)


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
        layout = Layout.of(value.shape)
        for node in path:
            layout = layout and layout.then(node)
        if layout and layout.is_permutation:
            best = value, layout.permutation
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


def is_transposed(graph: Graph, value: Value, order: tuple[int, ...]) -> bool:
    """Whether a fused op gives the value with its axes in that order, or wants it so."""
    return (id(value), order) in graph.transposes


def to_layout(graph: Graph, value: Value, layout: Layout, permutation) -> tuple[Value, Callable]:
    """(read, made): the value to read, and what makes of its array `value` in the origin's shape, axes in that order."""
    if layout.is_permutation:
        return transposed(graph, value, tuple(layout.permutation.index(d) for d in permutation)), lambda array: array
    return value, lambda array: layout.undo(array, permutation)


def channels_last(ndim: int, axis: int) -> tuple[int, ...]:
    return (*[d for d in range(ndim) if d != axis], axis)


def _blocks(a, b) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The finest pieces into which a reshape from `a` to `b` falls: axes of `a` and axes of `b`, those of length 1 left out."""
    left, right = ([d for d, n in enumerate(shape) if n != 1] for shape in (a, b))
    if 0 in a:
        yield tuple(left), tuple(right)
        return
    i = j = 0
    while i < len(left):
        start, products = (i, j), [a[left[i]], b[right[j]]]
        i, j = i + 1, j + 1
        while products[0] != products[1]:
            if products[0] < products[1]:
                products[0] *= a[left[i]]
                i += 1
            else:
                products[1] *= b[right[j]]
                j += 1
        yield tuple(left[start[0] : i]), tuple(right[start[1] : j])


def inverse(permutation) -> tuple[int, ...]:
    return tuple(map(int, np.argsort(permutation)))
