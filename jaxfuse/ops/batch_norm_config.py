"""What is static of a batch norm, and which of its arguments and residuals is which."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxfuse.ops.activations import NO_ACTIVATION, Activation
from jaxfuse.ops.batch_axes import equally_varying
from jaxfuse.program.equations import CUSTOM_DERIVATIVE_CALLS, closed_over, derivative
from jaxfuse.program.graph import Graph, evaluate


@dataclasses.dataclass(frozen=True)
class BatchNormConfig:
    """Everything static. Arguments are x, the residual if there is one, then the parameters of `per_channel`."""

    axis: int  # of the channels, not negative
    per_channel: Callable  # hashable; (mean, var, *parameters), or (*parameters) if the statistics are given
    batch_statistics: bool = True
    has_residual: bool = False
    activation: Activation = NO_ACTIVATION
    with_residuals: bool = False  # also return center, scale, offset and, where that is the derivative, the activation's mask
    always_masked: bool = False  # a mask of bits, also where the derivative can be had without
    xla_fuses_neighbour: bool = False  # policy has it so: XLA computes a neighbour along with it, which the kernels for CUDA need in memory

    @property
    def derivative(self) -> str:
        """Where the backward pass takes act'(z) from: z is recomputed from x and the residual; a bit for each element is
        less to keep than a residual, where it says all."""
        if self.activation == NO_ACTIVATION:
            return "none"
        return "mask" if self.always_masked or self.has_residual and self.activation.is_mask else "recompute"

    @property
    def saves_residual(self) -> bool:
        return self.has_residual and self.derivative == "recompute"

    @property
    def residual_outs(self) -> int:
        return (3 + (self.derivative == "mask")) * self.with_residuals

    def unpack(self, args):
        """(x, residual or None, parameters)"""
        x, *rest = args
        return x, rest[0] if self.has_residual else None, tuple(rest[self.has_residual :])

    def unpack_residuals(self, residuals):
        """(x, residual as a tuple of at most one, parameters, statistics, (center, scale, offset), mask likewise)"""
        x, *rest = residuals
        residual, rest = tuple(rest[: self.saves_residual]), rest[self.saves_residual :]
        masks = 1 if self.derivative == "mask" else 0
        small, mask = rest[: len(rest) - masks], tuple(rest[len(rest) - masks :])
        statistics = 2 * self.batch_statistics
        n = len(small) - 3 - statistics
        return x, residual, tuple(small[:n]), tuple(small[n : n + statistics]), tuple(small[n + statistics :]), mask


class PerChannelProgram:
    """The user's own arithmetic from (mean, var, *parameters) to (center, scale, offset); equal if it reads the same."""

    def __init__(self, function, types):
        closed = jax.make_jaxpr(function)(*types)
        self.graph = Graph(closed)
        rules = tuple(derivative(node.eqn) for node in self.graph.nodes if node.primitive in CUSTOM_DERIVATIVE_CALLS)  # not in the text
        self.text = str(closed.jaxpr), tuple(np.asarray(c).tobytes() for c in closed_over(closed)), rules

    def __call__(self, *arrays):
        """Inside a `shard_map` the arrays vary over its axes, and every number of the program has to follow them. On a shard of an
        XLA program there is no mesh of explicit axes any more."""
        return evaluate(self.graph, arrays, {}, lambda node, values: node.bind(equally_varying(values)))

    def __eq__(self, other):
        return isinstance(other, PerChannelProgram) and self.text == other.text

    def __hash__(self):
        return hash(self.text)

    def __repr__(self):
        return f"PerChannelProgram({len(self.graph.nodes)} equations)"
