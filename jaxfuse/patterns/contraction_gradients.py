"""What autodiff has made of a contraction, be it a convolution or a product: the gradients of both operands and of the bias,
which share a cotangent, and the derivative of the activation that the cotangent comes through.

Where they are, `analysis/gradients.py` finds. How an op computes them is said in its own folder.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.gradients import CONTRACTIONS, gradients_of
from jaxfuse.analysis.layout import inverse, transposed
from jaxfuse.analysis.normal import size
from jaxfuse.ops.activations import NO_ACTIVATION, Activation, named
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.patterns.activation_grad import activation_grads_at
from jaxfuse.patterns.contraction import Axes
from jaxfuse.patterns.kernel import require, types_of
from jaxfuse.patterns.walk import Chain, depends_on
from jaxfuse.program.autodiff import backward, forward
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match, Unfit


SAME_VALUES = {named("maximum0"): named("relu"), named("clip6"): named("relu6")}  # and at ties another derivative


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Of the operands of `node`, and of the bias added to what it gives, for the cotangent `dz` of that; None: not in the program.

    Behind an activation the cotangent is dy·act'(z), by the nodes `products`, and `saved` tells the derivative: the activation's
    value, or z where the value does not tell it. Else dy is dz. `sums` are values that are computed along with the gradients,
    `parameters` what else is read for these."""

    node: Node
    dz: Value
    dy: Value
    dx: Value | None
    dw: Value | None
    db: Value | None = None
    activation: Activation = NO_ACTIVATION
    saved: tuple[Value, ...] = ()
    products: tuple[Node, ...] = ()
    sums: tuple[Value, ...] = ()
    parameters: tuple[Value, ...] = ()

    def label(self, with_dz: bool = False) -> str:
        """`with_dz`: the cotangent behind the activation is computed too."""
        raise NotImplementedError

    def computed(self, made: tuple[Value, ...], backward: Callable, read: Callable[[Value], Any],
                 operands: list) -> Iterable[tuple[Value, Any]]:
        """The values `made`, as the op's `backward` gives them for these operands, and the sums."""
        return zip(made, backward(*operands))

    @property
    def wanted(self) -> tuple[Value, ...]:
        return tuple(v for v in (self.dx, self.dw, self.db) if v is not None)

    @property
    def bias_type(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return types_of(self.db) if self.db is not None else ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What computes them, from the cotangent of the activation's value on."""
        nodes = list(self.products)
        for value in self.wanted:
            nodes.append(value.node)
            while nodes[-1].primitive not in (*CONTRACTIONS, "reduce_sum"):
                nodes.append(nodes[-1].inputs[0].node)
        return tuple(nodes)

    def with_bias(self, axes: Axes) -> Self:
        """With the cotangent's sum over these axes, where the program takes it."""
        sums = [n.out for n in self.dz.users if n.primitive == "reduce_sum" and tuple(sorted(n.params["axes"])) == axes]
        return dataclasses.replace(self, db=sums[0]) if sums and axes else self

    def through_activation(self, graph: Graph, chains: list[Chain]) -> Self | None:
        """The same for the cotangent of the activation in one of these chains of the forward pass, if there is one: of the longest
        first, as of hard_sigmoid relu6 is a part. max(z, 0) with the derivative of relu is a relu."""
        original = forward(graph).original
        for activation, region in [(c.activation, c.region) for c in reversed(chains)]:
            if activation is None or region is None or region.start.dtype != self.dz.dtype:
                continue
            z = original(region.start)
            slopes = [slope for slope in activation_grads_at(graph, z, self.dz) if slope.dy.aval == self.dz.aval]
            for known in dict.fromkeys((activation, SAME_VALUES.get(activation, activation))):
                if slope := next((slope for slope in slopes if slope.is_of(known)), None):
                    saved = original(region.end) if known.derivative_from_y else z
                    return dataclasses.replace(self, dy=slope.dy, activation=known, saved=(saved,), products=tuple(slope.products))
        return None


Kind = TypeVar("Kind", bound=Gradients)


def found(kind: type[Kind], graph: Graph, node: Node, claimed: set[int], may_be_alone: Callable[[Kind], bool]) -> list[Kind]:
    """The gradients of both operands, for each cotangent that has them. Where none has, those of one of them: operands may be
    shared with other contractions, and a gradient be one of a pair of theirs, which `may_be_alone` is asked."""
    x, w = node.inputs
    if x.literal is not None or w.literal is not None or not all(jnp.issubdtype(v.dtype, jnp.inexact) for v in (x, w)):
        return []
    ways = []
    for gradient in gradients_of(graph, node, backward(graph)):
        dx, dw = (None if v is None or v.node.index in claimed else v for v in gradient.found)
        if gradient.dy not in node.inputs and (dx or dw):
            ways.append(kind(node, gradient.dy, gradient.dy, dx, dw))
    pairs = [way for way in ways if way.dx and way.dw]
    return pairs or sorted(filter(may_be_alone, ways), key=lambda way: way.dx is None)


def fused(graph: Graph, op: FusedOp, config: Any, gradients: Gradients, unprofitable, orders: dict[Value, Axes] | None = None) -> Match:
    """One call of the op's backward stage, which reads x, w, what is saved of the activation, and dy; values in `orders` it reads and
    gives with their axes in that order, as `config` has it. Raises `Unfit` where no kernel takes it."""
    node, dz, orders = gradients.node, gradients.dz, orders or {}
    fused_away = dead_after(graph, (*gradients.wanted, *gradients.sums))
    with_dz = bool(gradients.saved) and (graph.is_returned(dz) or any(n.index not in fused_away for n in dz.users))  # others read it
    made = (*gradients.wanted, dz) if with_dz else gradients.wanted
    has_bias = bool(gradients.bias_type)
    config = op.for_autodiff(dataclasses.replace(config, has_bias=has_bias, has_residual=with_dz, activation=gradients.activation))

    def ordered(value: Value) -> Value:
        return transposed(graph, value, orders[value]) if value in orders else value

    read = tuple(map(ordered, (*node.inputs, *gradients.saved, gradients.dy)))
    types = (*types_of(*read[:2]), *gradients.bias_type, *(types_of(ordered(dz)) if with_dz else ()))
    wanted = [gradients.dx is not None, gradients.dw is not None, *[True for has in (has_bias, with_dz) if has]]
    linear = Linear(config, tuple(wanted), types, len(read) - 1)
    require(op.backward, linear, types_of(*read), unprofitable, op.name, config, types, "backward")

    def run(reading):
        operands = [*map(reading, read)]
        for value, array in gradients.computed(made, functools.partial(op.backward, linear), reading, operands):
            if value in orders:
                yield ordered(value), array
                array = jnp.transpose(array, inverse(orders[value]))
            yield value, array

    needs = (*read, *gradients.parameters)
    defines = tuple(dict.fromkeys(v for value in (*made, *gradients.sums) for v in (ordered(value), value)))
    if depends_on(needs, defines):
        raise Unfit("the gradients depend on each other")
    saved = np.dtype(dz.dtype).itemsize * size(dz) * (has_bias + 2 * len(gradients.saved))
    return Match(gradients.label(with_dz), node, (), (Emission(needs, defines, run),), (gradients.dy, *node.inputs), saved, "backward")
