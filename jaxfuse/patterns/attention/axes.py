"""Axes of an attention's values by letters: what a transpose, a reshape or a broadcast makes of them."""

import dataclasses
import math

from jaxfuse.analysis.canonical import CAST, constant, is_float_cast, widens
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


def moved(node: Node, labels: Labels) -> Labels | None:
    """The labels after a transpose, or a reshape that adds or drops axes of length 1."""
    if node.primitive == "transpose":
        return tuple(labels[int(d)] for d in node.params["permutation"])
    if node.primitive in ("reshape", "squeeze", "expand_dims", "copy", "broadcast_in_dim"):
        return _respelled(node.inputs[0].shape, labels, node.out.shape)
    return None


def _respelled(shape, labels: Labels, wanted) -> Labels | None:
    """Labels of the wanted shape, which has the same axes but for some of length 1."""
    long = [label for n, label in zip(shape, labels) if n > 1]
    if [n for n in shape if n > 1] != [n for n in wanted if n > 1]:
        return None
    own = iter(long)
    return labels if tuple(shape) == tuple(wanted) else tuple(next(own) if n > 1 else None for n in wanted)


def aligned(other: Value, value: Value, labels: Labels) -> Labels:
    """Labels of what is combined with the value: of its rank, or a number."""
    return tuple(label if n == m else None for n, m, label in zip(other.shape, value.shape, labels)) if other.ndim else ()


def origin(value: Value, labels: Labels, until: Node | None = None) -> Operand:
    """What the value was repeated, moved and widened from; on the way to what the node `until` gives also what its maximum or sum was
    rounded from: a softmax is the same whatever is taken from its rows."""
    for _ in range(FARTHEST):
        node = value.producer
        if node is None or node is until:
            break
        source = next((v for v in node.inputs if constant(v) is None), None)
        if source is None:
            break
        own = None
        if node.primitive == "broadcast_in_dim":
            axes = node.params["broadcast_dimensions"]
            own = tuple(labels[int(d)] if n == node.out.shape[int(d)] else None for n, d in zip(source.shape, axes))
        elif node.primitive == "transpose":
            order = [int(d) for d in node.params["permutation"]]
            own = tuple(labels[order.index(d)] for d in range(len(order)))
        elif node.primitive in ("reshape", "squeeze", "expand_dims", "copy"):
            own = _respelled(node.out.shape, labels, source.shape)
        elif is_float_cast(node) and widens(node) or until is not None and _keeps_a_maximum(node):
            own = labels
        if own is None:
            break
        value, labels = source, own
    return Operand(value, labels)


def _keeps_a_maximum(node: Node) -> bool:
    """But for its rounding."""
    return node.primitive in ("stop_gradient", CAST) or node.primitive == "max" and -math.inf in map(constant, node.inputs)
