"""Axes of an attention's values by letters: what a transpose, a reshape, a broadcast or a product makes of them."""

import dataclasses
import math

from jaxfuse.analysis.axes import IndexMap, is_long, merged
from jaxfuse.analysis.normal import CAST, constant, is_float_cast, widens
from jaxfuse.program.graph import Node, Value

FARTHEST = 12  # steps to where a value was repeated or moved from
Labels = tuple[str | None, ...]  # a letter for every axis; None: of length 1


@dataclasses.dataclass(frozen=True)
class Operand:
    """A bias or a mask: a value that is repeated along the axes that it lacks. `inverted`: a mask that is True where `fill` is."""

    value: Value
    labels: Labels
    inverted: bool = False

    @property
    def spec(self) -> str:
        return "".join(letter for letter in self.labels if letter)


def _sources(node: Node) -> tuple[int | None, ...] | None:
    """The axis of the node's input that each axis of its output is, None for those of length 1 and those along which it repeats; None
    for a node that does more than move and repeat whole axes."""
    if node.primitive == "transpose":
        return tuple(map(int, node.params["permutation"]))
    if len(node.inputs) != 1 or (index_map := IndexMap.of(node.inputs[0].shape).then(node)) is None:
        return None
    axes = {own: axis for axis, own in enumerate(IndexMap.of(node.inputs[0].shape).sub_axes) if is_long(own[0][1])}
    varying = [tuple(sub_axis for sub_axis in merged(own) if sub_axis[0]) for own in index_map.sub_axes]
    return tuple(axes.get(own) for own in varying) if all(own in axes or not own for own in varying) else None


def moved(node: Node, labels: Labels) -> Labels | None:
    """The labels after a transpose, or a reshape that adds or drops axes of length 1."""
    sources = _sources(node)
    if sources is None or any(source is None and is_long(n) for source, n in zip(sources, node.out.shape)):
        return None
    return tuple(None if source is None else labels[source] for source in sources)


def of_product(node: Node, left: Labels, right: Labels) -> Labels:
    """The labels of a product whose operands have these."""
    contracted, batch = node.params["dimension_numbers"]
    free = [[a for d, a in enumerate(labels) if d not in (*summed, *shared)]
            for labels, summed, shared in zip((left, right), contracted, batch)]
    return (*[left[d] for d in batch[0]], *free[0], *free[1])


def aligned(other: Value, value: Value, labels: Labels) -> Labels:
    """Labels of what is combined with the value: of its rank, or a number."""
    return tuple(label if n == m else None for n, m, label in zip(other.shape, value.shape, labels)) if other.ndim else ()


def origin(value: Value, labels: Labels, until: Node | None = None) -> Operand:
    """What the value was repeated, moved and widened from; on the way to what the node `until` gives also what its maximum or sum was
    rounded from, and of a maximum what stops its gradient: a softmax is the same whatever is taken from its rows."""
    for _ in range(FARTHEST):
        node = value.producer
        source = next((v for v in node.inputs if constant(v) is None), None) if node is not None and node is not until else None
        if node is None or source is None:
            break
        rounds = until is not None and (_keeps_a_maximum(node) if until.primitive == "reduce_max" else is_float_cast(node))
        if not (is_float_cast(node) and widens(node) or rounds):
            sources = _sources(node)
            if sources is None:
                break
            labels = tuple(labels[sources.index(axis)] if axis in sources else None for axis in range(source.ndim))
        value = source
    return Operand(value, labels)


def _keeps_a_maximum(node: Node) -> bool:
    """But for its rounding."""
    return node.primitive in ("stop_gradient", CAST) or node.primitive == "max" and -math.inf in map(constant, node.inputs)
