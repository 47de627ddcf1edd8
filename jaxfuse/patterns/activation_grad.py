"""The gradient of an activation in a differentiated program: dz = dy·act'(z), and the bias gradient Σdz that reads it.

Autodiff writes it as many nodes. They are found from z, the activation's input, and named by what they compute at dy = 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxfuse.analysis.normal import ADD, CAST, constant, is_float_cast, is_rounded, narrowest, scaled
from jaxfuse.analysis.regions import Region, reached, replayed
from jaxfuse.ops.activations import Activation
from jaxfuse.ops.naming import table_at
from jaxfuse.program.autodiff import backward
from jaxfuse.program.bodies import filled
from jaxfuse.program.elementwise import FAR, FINITE, Traced
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Refusal
from jaxfuse.runtime.reasons import no_kernel

LARGEST = 80  # nodes: the activation, its derivative, and their product with dy
LINEAR = (*ADD, "sub", "neg", "mul", "div", "select_n", CAST)


class ActivationGrad(NamedTuple):
    """dz = dy·act'(z) for some function act, as computed by functions of z and products with these."""

    z: Value
    dy: Value
    dz: Value
    functions: list[Node]
    products: list[Node]

    def is_of(self, activated: Activation, region: Region | None) -> bool:
        """Whether dz is act'(z) where dy is 1, to five digits: a factor of 0.99 is the loss's own. The derivative is that of the region
        which computes the activation, where it is given: its constants may be rounded."""
        steps = sorted({n for n in (*self.functions, *self.products) if n.index <= self.dz.node.index}, key=lambda n: n.index)

        def function(x):
            return [replayed(steps, {self.z: x, self.dy: filled(self.dy, 1)})[self.dz]]

        traced = Traced(function, self.z.aval)
        points = np.concatenate([FINITE, [FAR, -FAR, np.inf, -np.inf], activated.ties, traced.between()])
        slope = traced(points)
        if slope is None:
            return False
        own = region.table(points) if region else None
        known = (table_at(activated, points) if own is None else own)[1]
        overflows = (np.abs(points) >= FAR) & ~np.isfinite(slope[0]) & (np.abs(known) < 1e-9)  # an exp on the way to 0
        forgiven = overflows | np.isinf(points) & np.isnan(known)  # 0·Inf, which another order makes 0
        return bool(np.all(np.isclose(slope[0], known, rtol=1e-5, atol=1e-5, equal_nan=True) | forgiven))


def activation_grad(graph: Graph, z: Value, activated: Activation, region: Region) -> Iterator[Refusal]:
    """The row of the gradient through the activation of z, if the backward pass is in this graph."""
    if not backward(graph) or z.producer is None:
        return
    functions = _functions_of(z)
    for dy in _cotangents(graph, z, functions):
        products = _products(graph, dy, z, functions)
        inside = {n.index for n in products}
        for last in products[::-1]:
            outside = [n for n in last.out.users if n.index not in inside]
            found = ActivationGrad(z, dy, last.out, functions, products)
            if outside and last.index not in graph.marks.fused_away and found.is_of(activated, region):
                sums = [n for n in outside if n.primitive == "reduce_sum" and n.out.ndim < last.out.ndim]
                pattern = f"{activated.name}_grad+bias_grad" if sums else f"{activated.name}_grad"
                yield Refusal(pattern, last, (dy, z), no_kernel(), "backward", (*products, *sums))
                return


def activation_grads_at(graph: Graph, z: Value, dz: Value) -> Iterator[ActivationGrad]:
    """The ways in which dz comes from a cotangent and functions of z: through the most of them first. Where a loss reads nothing but
    the activation's value y, dy is a function of z too, as that of Σy², or a number, that of Σy."""
    functions = _functions_of(z)
    combined = _cotangents(graph, z, functions)
    unscaled = [known[0] for v in combined if v.producer and (known := scaled(v.producer))]  # of selu, of hard_sigmoid
    ways = [(dy, functions) for dy in sorted((*unscaled, *combined), key=lambda v: v.index)]
    if dz.producer in functions:
        behind = [n for n in functions if n.index in backward(graph)]
        numbers = [v for n in behind if n.primitive in LINEAR for v in n.inputs if v.literal is None and constant(v) is not None]
        alike = [v for v in dict.fromkeys((*numbers, *[n.out for n in behind])) if (v.shape, v.dtype) == (dz.shape, dz.dtype)]
        ways += [(dy, _functions_of(z, dy)) for dy in sorted(alike, key=lambda v: v.index)]
    for dy, functions in ways:
        products = _products(graph, dy, z, functions)
        if dy is not dz and dz.producer in products:
            yield ActivationGrad(z, dy, dz, functions, products)


def _functions_of(z: Value, but: Value | None = None) -> list[Node]:
    """What is computed from z alone, and not from the value `but`."""
    return [*reached(z, LARGEST, lambda node, made: node.out is not but and all(v in made or constant(v) is not None for v in node.inputs))]


def _cotangents(graph: Graph, z: Value, functions: list[Node]) -> list[Value]:
    """What transposed nodes combine with z or a function of it."""
    values, back = {z, *[n.out for n in functions]}, backward(graph)
    readers = [n for value in (z, *[n.out for n in functions]) for n in value.users if n.index in back and n.primitive in LINEAR]
    others = dict.fromkeys(v for n in readers for v in n.inputs if v not in values and v.shape == z.shape)
    return [v for v in others if constant(v) is None]


def _products(graph: Graph, dy: Value, z: Value, functions: list[Node]) -> list[Node]:
    """Nodes that are linear in dy, with functions of z as factors. What a cast loses of dy stays lost."""
    values, back = {z, *[n.out for n in functions]}, backward(graph)

    def takes(node: Node, made: set[Value]) -> bool:
        known = all(v in made or v in values or constant(v) is not None for v in node.inputs)
        if node.primitive == CAST and (not is_float_cast(node) or is_rounded(node.inputs[0], (dy, narrowest(dy)))):
            return False
        return node.index in back and known and _is_linear(node, made)

    return [*reached(dy, LARGEST, takes)]


def _is_linear(node: Node, made: set[Value]) -> bool:
    """In what is made of dy, the other operands fixed."""
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
