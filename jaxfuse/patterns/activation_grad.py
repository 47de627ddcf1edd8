"""The gradient of an activation in a differentiated program: dz = dy·act'(z), and the bias gradient Σdz that reads it.

Autodiff writes it as many nodes. They are found from z, the activation's input, and named by what they compute at dy = 1.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import ADD, CAST, constant, filled, held, scaled
from jaxfuse.analysis.elementwise import FINITE, is_elementwise, values_of
from jaxfuse.ops.activations import Activation
from jaxfuse.ops.naming import derivatives
from jaxfuse.program.autodiff import backward
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Refusal
from jaxfuse.runtime.reasons import no_kernel


class ActivationGrad(NamedTuple):
    """dz = dy·act'(z) for some function act, as computed by functions of z and products with these."""

    z: Value
    dy: Value
    dz: Value
    functions: list[Node]
    products: list[Node]

    def is_of(self, activated: Activation) -> bool:
        return _is_slope(self.z, self.dy, [*self.functions, *self.products], self.dz.node, activated)


LARGEST = 80  # nodes: the activation, its derivative, and their product with dy
LINEAR = (*ADD, "sub", "neg", "mul", "div", "select_n", CAST)


def activation_grad(graph: Graph, preactivation: Value, activated: Activation):
    """Yields the row of the gradient through `activated`, if the backward pass is in this graph."""
    back = backward(graph)
    if not back or preactivation.producer is None:
        return
    producer = preactivation.producer  # of the graph's forward part: the graph's own node has the same index
    z = graph.nodes[producer.index].outputs[producer.outputs.index(preactivation)]
    functions = _functions_of(z)
    values = {z, *[n.out for n in functions]}
    for dy in _cotangents(functions, z, values, back):
        products = _products(dy, values, back)
        made = {n.out for n in products}
        for last in products[::-1]:
            outside = [n for n in last.out.users if made.isdisjoint(n.outputs)]
            if outside and last.index not in graph.marks.fused_away and _is_slope(z, dy, [*functions, *products], last, activated):
                yield _row(z, dy, products, last, outside, activated.name)
                return


def activation_grad_of(graph: Graph, z: Value, dz: Value, activated: Activation, fits: Callable[[Value], bool]) -> ActivationGrad | None:
    """How dz comes from a cotangent of act(z) that `fits`."""
    return next((way for way in activation_grads_at(graph, z, dz) if fits(way.dy) and way.is_of(activated)), None)


def activation_grads_at(graph: Graph, z: Value, dz: Value) -> Iterator[ActivationGrad]:
    """The ways in which dz comes from a cotangent and functions of z: through the most of them first."""
    back, functions = backward(graph), _functions_of(z)
    values = {z, *[n.out for n in functions]}
    combined = _cotangents(functions, z, values, back)
    unscaled = [known[0] for v in combined if v.producer and (known := scaled(v.producer))]  # of selu, of hard_sigmoid
    for dy in _in_order((*unscaled, *combined)):
        products = _products(dy, values, back)
        if dy is not dz and dz.producer in products:
            yield ActivationGrad(z, dy, dz, functions, products)
    yield from _slopes_of_a_loss(z, dz, functions, back)


def _slopes_of_a_loss(z: Value, dz: Value, functions: list[Node], back) -> Iterator[ActivationGrad]:
    """Where a loss reads nothing but the activation's value y, dy is a function of z too, as that of Σy², or a number, that of Σy."""
    if dz.producer not in functions:
        return
    behind = [n for n in functions if n.index in back]
    numbers = [v for n in behind if n.primitive in LINEAR for v in n.inputs if v.literal is None and constant(v) is not None]
    values = dict.fromkeys((*numbers, *[n.out for n in behind]))
    for dy in _in_order(v for v in values if (v.shape, v.dtype) == (dz.shape, dz.dtype)):
        others = _functions_of(z, dy)
        products = _products(dy, {z, *[n.out for n in others]}, back)
        if dy is not dz and dz.producer in products:
            yield ActivationGrad(z, dy, dz, others, products)


def _in_order(values) -> list[Value]:
    return sorted(values, key=lambda v: v.producer.index if v.producer else -1)


def _row(z: Value, dy: Value, products: list[Node], last: Node, outside: list[Node], name: str) -> Refusal:
    sums = [n for n in outside if n.primitive == "reduce_sum" and n.out.ndim < n.inputs[0].ndim]
    pattern = f"{name}_grad+bias_grad" if sums else f"{name}_grad"
    return Refusal(pattern, last, (dy, z), no_kernel(), "backward", (*products, *sums))


def _functions_of(z: Value, but: Value | None = None) -> list[Node]:
    """Elementwise nodes computed from z alone, and not from the value `but`."""
    readers = {n.index: n for n in z.users}
    values, heap, seen = {z}, list(readers.items()), set(readers)
    found: list[Node] = []
    heapq.heapify(heap)
    while heap and len(found) < LARGEST:
        _, node = heapq.heappop(heap)
        known = all(v in values or constant(v) is not None for v in node.inputs)
        if is_elementwise(node) and node.out is not but and known:
            found.append(node)
            values.add(node.out)
            for user in node.out.users:
                if user.index not in seen:
                    seen.add(user.index)
                    heapq.heappush(heap, (user.index, user))
    return found


def _cotangents(functions: list[Node], z: Value, values: set[Value], back) -> list[Value]:
    """What transposed nodes combine with z or a function of it."""
    readers = [n for value in (z, *[n.out for n in functions]) for n in value.users if n.index in back and n.primitive in LINEAR]
    others = dict.fromkeys(v for n in readers for v in n.inputs if v not in values and v.shape == z.shape)
    return [v for v in others if constant(v) is None]


def _products(dy: Value, values: set[Value], back) -> list[Node]:
    """Nodes that are linear in dy, with functions of z as factors."""
    made, frontier = {dy}, {n.index: n for n in dy.users}
    found: list[Node] = []
    while frontier and len(found) < LARGEST:
        node = frontier.pop(min(frontier))
        known_inputs = all(v in made or v in values or constant(v) is not None for v in node.inputs)
        if node.index in back and is_elementwise(node) and known_inputs and _is_linear(node, made):
            found.append(node)
            made.add(node.out)
            frontier |= {n.index: n for n in node.out.users}
    return found


def _is_linear(node: Node, made: set[Value]) -> bool:
    """In what is made of dy, the other operands held."""
    of_dy = [v in made for v in node.inputs]
    match node.primitive:
        case "mul":
            return of_dy.count(True) == 1
        case "div":
            return of_dy == [True, False]
        case "select_n":
            return not of_dy[0] and all(linear or constant(v) == 0 for v, linear in zip(node.inputs[1:], of_dy[1:]))
        case _:
            return node.primitive in LINEAR and all(linear or constant(v) == 0 for v, linear in zip(node.inputs, of_dy))


def _is_slope(z: Value, dy: Value, nodes: list[Node], last: Node, activated: Activation) -> bool:
    """Whether `last` computes act'(z) where dy is 1."""
    steps = sorted((n for n in nodes if n.index <= last.index), key=lambda n: n.index)

    def function(x):
        made = {z: x, dy: filled(dy, 1)}
        for node in steps:
            (made[node.out],) = node.replay([made[v] if v in made else held(v) for v in node.inputs])
        return [made[last.out]]

    points = np.concatenate([FINITE, activated.ties])
    slope = values_of(function, z.aval, points)
    tolerance = 2e-2 if jnp.finfo(z.dtype).bits < 32 else 1e-4
    expected = derivatives(activated, points)
    return slope is not None and np.allclose(slope[0], expected, rtol=tolerance, atol=tolerance)
