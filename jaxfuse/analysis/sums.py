"""Sums of a value over some of its axes, in one step or several; and what is squared before it is summed."""

import numbers
from collections.abc import Iterator
from typing import NamedTuple

from jaxfuse.analysis.axes import IndexMap
from jaxfuse.analysis.layout import RESHAPES, is_reshape
from jaxfuse.analysis.normal import Product, chosen, constant, is_float_cast, narrowest, normal, scale_factor, uncast
from jaxfuse.program.graph import Node, Value


def squared(value: Value) -> tuple[Value, bool] | None:
    """(what it is the square of, whether it is 0 where a mask, which is data, says so); of a value less its mean, the value."""
    whole = unmasked(value)
    node = whole.producer
    if node is None or not node.inputs or normal(node) != Product(((node.inputs[0], 2.0),)):
        return None
    base, masked = narrowest(node.inputs[0]), whole is not narrowest(value)
    if base.producer is not None and base.producer.primitive == "sub" and _is_mean(base.producer.inputs[1]):
        base = narrowest(base.producer.inputs[0])
    return base, masked


def unmasked(value: Value) -> Value:
    """What statistics with a mask are of: select(mask, x, 0), or a product with ones."""
    value = narrowest(chosen(narrowest(value)))
    node = value.producer
    if node is not None and node.primitive == "select_n" and len(node.inputs) == 3:
        for zero, kept in (node.inputs[1:], node.inputs[:0:-1]):
            if constant(zero) == 0 and constant(kept) is None:
                return narrowest(kept)
    return value


def _is_mean(value: Value) -> bool:
    """Whether the value is a sum over some axes, divided."""
    total = uncast(value, *RESHAPES, "transpose", "div", "mul", "psum").producer
    return total is not None and total.primitive == "reduce_sum"


class Reduction(NamedTuple):
    """`value` = weight · the sum of a tensor over the axes that are no more in its `index_map`; `first` is the node that reads the
    tensor."""

    value: Value
    weight: float
    index_map: IndexMap
    first: Node

    def left(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a tensor of this shape that it was not summed over."""
        remaining, left = list(self.index_map.sub_axes), []
        for d, own in reversed([*enumerate(IndexMap.of(shape).sub_axes)]):
            if own in remaining:
                remaining.remove(own)
                left.append(d)
        return tuple(left[::-1])


def reductions(tensor: Value, index_map: IndexMap) -> Iterator[Reduction]:
    """Its sums over some axes, and further sums of these: under `vmap` a mean over the batch is a mean of means."""
    stack: list[tuple[Value, float, IndexMap, Node | None]] = [(tensor, 1.0, index_map, None)]
    while stack:
        value, weight, index_map, first = stack.pop()
        if first and not index_map.is_stacked:
            yield Reduction(value, weight, index_map, first)
        for node in value.users:
            factor = scale_factor(node, value) if first else None
            # over axes of its operands, not over those of a mesh, which have names
            if node.primitive in ("reduce_sum", "psum") and all(isinstance(axis, numbers.Integral) for axis in node.params["axes"]):
                total = node.outputs[node.inputs.index(value)]
                stack.append((total, weight, index_map.without(node.params["axes"]), first or node))
            elif factor or first and is_float_cast(node):
                stack.append((node.out, weight * (factor or 1), index_map, first))
            elif first:
                stack += [(node.out, weight, moved, first) for moved in _moved(node, value, index_map)]


def _moved(node: Node, value: Value, index_map: IndexMap) -> Iterator[IndexMap]:
    """Where the elements of `value` are in the node's output, if the node does no arithmetic."""
    if node.primitive == "stack":  # Flax makes one `pmean` of the mean and the mean square
        axis, count = node.params["axis"], len(node.inputs)
        yield from [index_map.stacked(axis, i, count) for i, operand in enumerate(node.inputs) if operand is value]
    elif node.primitive in ("transpose", "slice") or is_reshape(node):
        moved = index_map.then(node)
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
