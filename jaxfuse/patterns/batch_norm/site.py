"""A recognised batch norm as a Match: with the residual and the activation after it, and its gradient where the program has it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import ADD, CAST, NotPerChannel, per_channel, size
from jaxfuse.analysis.layout import channels_last, to_layout, transposed
from jaxfuse.analysis.statistics import Statistics
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.batch_norm import OP
from jaxfuse.ops.batch_norm_config import BatchNormConfig
from jaxfuse.ops.batch_norm_grad import GradientConfig
from jaxfuse.patterns.batch_norm import gradient as batch_norm_grad
from jaxfuse.patterns.batch_norm.gradient import Gradient
from jaxfuse.patterns.batch_norm.per_channel import cut_out, uses
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import Chain
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import FusedReader
from jaxfuse.program.site import Match, Refusal, Unfit


class Unscaled(Unfit):
    """The walk ended before the variance was used: where it ended is the reason to name."""


def label(chain: Chain) -> str:
    """The per-channel steps of a chain that begins at a value with statistics are its normalisation."""
    return "+".join(["bn", *chain.after_affine])


class Site:
    """A value with batch statistics that the sum `node` is one of, and the gradient through them, if the program computes it."""

    def __init__(self, graph: Graph, node: Node, statistics: Statistics, gradient: Gradient | None, unprofitable: Callable):
        self.graph, self.node, self.statistics, self.gradient = graph, node, statistics, gradient
        self.x, self.axis, self.unprofitable = statistics.x, statistics.axis, unprofitable
        # The kernels are channels-last, and so is what the fused ops around give and take: transposes between them vanish.
        self.order = channels_last(self.x.ndim, self.axis)

    def fused(self, chain: Chain) -> Match:
        """Raises `Unfit` where no kernel takes the chain."""
        self._require_its_own(chain)
        program, parameters = cut_out(self.statistics, chain)
        operands = (self.x,) if chain.residual is None else (self.x, chain.residual)
        derivative = self._derivative(chain)
        config = BatchNormConfig(self.x.ndim - 1, program, has_residual=chain.residual is not None,
                                 activation=chain.activation or NO_ACTIVATION, saving=derivative is not None,
                                 keeps_mask=derivative is not None and derivative.masked)
        full = jax.ShapeDtypeStruct([self.x.shape[d] for d in self.order], self.x.dtype)
        types = (*[full] * len(operands), *[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in parameters])
        if _xla_fuses_neighbour(chain, self.axis):
            cost = self.unprofitable("batch_norm", config, types, cost=batch_norm_grad.FUSED_BY_XLA)
            config = dataclasses.replace(config, xla_fuses_neighbour=bool(cost))
        require(OP.forward, config, types, self.unprofitable, "batch_norm", config, types)
        kept = _kept_for(derivative, size(self.x), self.x.shape[self.axis])
        passes = 1 + 2 * len([n for n in chain.nodes if n.primitive != CAST]) // 2
        return Match(label(chain), self.node, chain.nodes, (self._emission(chain, config, parameters, kept),), operands,
                     np.dtype(self.x.dtype).itemsize * size(self.x) * passes)

    def _require_its_own(self, chain: Chain):
        """Raises `Unfit` for a chain that is no normalisation, or that adds what the kernel cannot."""
        if not any(kind in ("mul", "div") for kind, _ in chain.affine):
            raise Unscaled("it is centered, not scaled")
        if chain.residual is None:
            return
        if chain.residual.dtype != self.x.dtype:
            raise Unfit(f"residual {chain.residual!r} is of another dtype than {self.x!r}")
        if uses(self.statistics, chain.residual, tuple(v for n in chain.nodes for v in n.outputs)):
            raise Unfit("the residual is computed from x's own statistics")

    def _emission(self, chain: Chain, config: BatchNormConfig, parameters: list[Value], kept: list[Value]) -> Emission:
        full: tuple[Value, ...] = (transposed(self.graph, self.x, self.order),)
        if chain.residual is not None and chain.residual_layout is not None:
            added, undo = to_layout(self.graph, chain.residual, chain.residual_layout, self.order)
            full = *full, added
        copies = (transposed(self.graph, chain.end, self.order),) if chain.layout.is_identity else ()  # channels-last
        known = self.statistics.known

        def run(read):
            first, *residual = map(read, full)
            y, mean, var, *saved = OP(config, first, *[undo(array) for array in residual], *map(read, parameters))
            yield chain.end, chain.layout.place(y, self.order)
            yield from chain.masks_from(chain.layout.place(y, self.order))
            yield from zip(kept, saved[3:] if config.keeps_mask else saved)
            yield from zip(copies, (y,))
            for value, moment in known.items():
                yield value, moment.of(mean, var).astype(value.dtype).reshape(value.shape)

        return Emission((*full, *parameters), (chain.end, *copies, *known, *chain.masks, *kept), run)

    # --- the gradient

    def begins_behind(self, chain: Chain) -> bool:
        """Whether the gradient is that of the chain's activation too, by a function of the activation's argument."""
        slope = self.gradient and self.gradient.slope
        return bool(slope and chain.region and chain.activation and chain.region.start is slope.z and slope.is_of(chain.activation))

    def _derivative(self, chain: Chain) -> GradientConfig | None:
        """How the passes of the gradient are told the activation's derivative, if they can begin before the activation."""
        if self.gradient is None or chain.activation is None:
            return None
        if self.begins_behind(chain):
            if chain.residual is not None and chain.activation.is_mask:  # less to read than the residual
                return GradientConfig(0, True)
            return GradientConfig(0, False, False, chain.activation, chain.residual is not None)
        return GradientConfig(0, True) if batch_norm_grad.mask_of(self.gradient, chain) is not None else None

    def backward(self, gradient: Gradient, forward: Match, chain: Chain) -> Match | Refusal:
        """The gradient of what is fused as `forward`."""
        emission, config = forward.emissions[0], self._derivative(chain)
        kept = tuple(v for v in emission.defines if v.producer is None)
        residual = emission.needs[1:2] if config and config.has_residual else ()
        saved = batch_norm_grad.SavedActivation(config, (*kept, *residual)) if config else None
        beside = _xla_fuses_neighbour(chain, self.axis)
        try:
            return batch_norm_grad.fused(self.graph, gradient, forward.pattern, self.node, saved, beside, self.unprofitable)
        except Unfit as unfit:
            return Refusal(forward.pattern, self.node, (gradient.g, self.x), unfit.reason, "backward")


def _xla_fuses_neighbour(chain: Chain, axis: int) -> bool:
    """Whether it reads or is read by what XLA can compute along with it and never writes: a max pool of it, whose gradient is
    elementwise in the winners, or, of two normalised values that are added, the other one."""
    if any(node.primitive == "reduce_window_max" for node in chain.end.users):
        return True
    if chain.residual is not None and chain.residual_layout is not None:
        return _is_normalised(chain.residual, chain.residual_layout.axes(axis) or ())
    return any(isinstance(node, FusedReader) and node.match.operands[1:] == (chain.end,) for node in chain.end.users)


def _is_normalised(value: Value, axes: tuple[int, ...]) -> bool:
    """Whether it is made, by numbers for each channel, of a value that is summed as well."""
    while value.producer is not None:
        node = value.producer
        full = [v for v in node.inputs if v.shape == value.shape and isinstance(per_channel(v, value, axes), NotPerChannel)]
        if node.primitive not in (*ADD, "sub", "mul", "div", CAST) or len(full) != 1:
            return False
        (value,) = full
        if any(user.primitive == "reduce_sum" for user in value.users):
            return True
    return False


def _kept_for(derivative: GradientConfig | None, elements: int, channels: int) -> list[Value]:
    """What the forward pass saves for it: the bits of the mask, or center, scale and offset."""
    if derivative is None:
        return []
    if derivative.masked:
        return [Value(jax.ShapeDtypeStruct((elements // max(1, channels), -(-channels // 8)), jnp.uint8))]
    return [Value(jax.ShapeDtypeStruct((channels,), jnp.float32)) for _ in range(3)]
