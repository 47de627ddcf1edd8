"""What autodiff has made of a contraction, be it a convolution or a product: the gradients of both operands and of the bias,
which share a cotangent, and the derivative of the activation that the cotangent comes through.

Where they are, `analysis/gradients.py` finds. How an op computes them is said in its own folder.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import size
from jaxfuse.analysis.gradients import CONTRACTIONS, gradients_of
from jaxfuse.ops.activations import NO_ACTIVATION, Activation
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.patterns.activation_grad import activation_grad_of
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import Chain, depends_on
from jaxfuse.program.autodiff import backward, forward
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match, Unfit


@dataclasses.dataclass(frozen=True)
class Activated:
    """The cotangent is dy·act'(z). `saved` tells the derivative: the activation's value, or z where the value does not tell it."""

    dy: Value
    saved: Value
    activation: Activation
    nodes: tuple[Node, ...] = ()  # that multiply by the derivative
    placed: Callable | None = None  # what lays the value at a chain's end as z lies


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Of the operands of `node`, and of the bias added to what it gives, for the cotangent `dz` of that; None: not in the program."""

    node: Node
    dz: Value
    dx: Value | None
    dw: Value | None
    db: Value | None = None
    through: Activated | None = None

    @property
    def wanted(self) -> tuple[Value, ...]:
        return tuple(v for v in (self.dx, self.dw, self.db) if v is not None)

    @property
    def activation(self) -> Activation:
        return self.through.activation if self.through else NO_ACTIVATION

    @property
    def dy(self) -> Value:
        return self.through.dy if self.through else self.dz

    @property
    def has_bias(self) -> bool:
        return self.db is not None

    @property
    def saved(self) -> tuple[Value, ...]:
        return (self.through.saved,) if self.through else ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What computes them, from the cotangent of the activation's value on."""
        nodes = list(self.through.nodes) if self.through else []
        for value in self.wanted:
            nodes.append(value.node)
            while nodes[-1].primitive not in (*CONTRACTIONS, "reduce_sum"):
                nodes.append(nodes[-1].inputs[0].node)
        return tuple(nodes)

    def with_bias(self, axes: tuple[int, ...]):
        """With the cotangent's sum over these axes, where the program takes it."""
        sums = [n.out for n in self.dz.users if n.primitive == "reduce_sum" and tuple(sorted(n.params["axes"])) == axes]
        return dataclasses.replace(self, db=sums[0]) if sums and axes else self


Types = tuple[jax.ShapeDtypeStruct, ...]


def found(graph: Graph, node: Node, claimed: set[int], may_be_alone: Callable[[Gradients], bool]) -> list[Gradients]:
    """The gradients of both operands, for each cotangent that has them. Where none has, those of one of them: operands may be
    shared with other contractions, and a gradient be one of a pair of theirs, which `may_be_alone` is asked."""
    x, w = node.inputs
    if x.literal is not None or w.literal is not None or not all(jnp.issubdtype(v.dtype, jnp.inexact) for v in (x, w)):
        return []
    ways = []
    for gradient in gradients_of(graph, node, backward(graph)):
        dx, dw = (None if v is None or v.node.index in claimed else v for v in gradient.found)
        if gradient.dy not in node.inputs and (dx or dw):
            ways.append(Gradients(node, gradient.dy, dx, dw))
    pairs = [way for way in ways if way.dx and way.dw]
    return pairs or sorted(filter(may_be_alone, ways), key=lambda way: way.dx is None)


def through_activation(graph: Graph, dz: Value, chains: list[Chain], value: Callable[[Chain], Value],
                       fits: Callable[[Value], bool]) -> Activated | None:
    """Looks through dy·act'(z), of the activation in one of these chains of the forward pass, to a dy that `fits`: the longest
    first, as of hard_sigmoid relu6 is a part. `value` is what is kept of a chain where its activation's value tells the derivative."""
    part = forward(graph)
    for chain in reversed(chains):
        z = part.original(chain.region.start)
        slope = activation_grad_of(graph, z, dz, chain.activation, fits)
        if slope and chain.activation.derivative_from_y:
            return Activated(slope.dy, part.original(value(chain)), chain.activation, tuple(slope.products), chain.as_activated)
        if slope:
            return Activated(slope.dy, z, chain.activation, tuple(slope.products))
    return None


def is_read_elsewhere(graph: Graph, dz: Value, defined: Iterable[Value]) -> bool:
    """Whether others than what makes the values `defined` read the cotangent."""
    fused_away = dead_after(graph, tuple(defined))
    return graph.is_returned(dz) or any(n.index not in fused_away for n in dz.users)


def backward_call(op: FusedOp, gradients: Gradients, config: Any, types: Types, read: Types, unprofitable) -> Linear:
    """The op's backward stage for operands of these `types`; it reads x, w, what is saved of the activation, and dy. Raises
    `Unfit` where no kernel takes it."""
    wanted = [gradients.dx is not None, gradients.dw is not None]
    wanted += [True for has in (config.has_bias, config.has_residual) if has]
    linear = Linear(config, tuple(wanted), types, len(read) - 1)
    require(op.backward, linear, read, unprofitable, op.name, config, types, "backward")
    return linear


def match(gradients: Gradients, label: str, needs: tuple[Value, ...], defines: tuple[Value, ...], run) -> Match:
    """Raises `Unfit` where what is needed is computed from what is defined."""
    node, dz = gradients.node, gradients.dz
    if depends_on(needs, defines):
        raise Unfit("the gradients depend on each other")
    saved = np.dtype(dz.dtype).itemsize * size(dz) * (gradients.has_bias + 2 * len(gradients.saved))
    return Match(label, node, (), (Emission(needs, defines, run),), (gradients.dy, *node.inputs), saved, "backward")
