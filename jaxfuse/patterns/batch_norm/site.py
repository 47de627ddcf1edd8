"""A recognised batch norm as a Match: with the user's own arithmetic between its statistics and its result, which is cut out of the
program, with the residual and the activation after it, and with its gradient where the program has it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxfuse.analysis.layout import channels_last, to_layout
from jaxfuse.analysis.normal import ADD, CAST, NotPerChannel, nbytes, per_channel, size
from jaxfuse.analysis.regions import cone, depends_on
from jaxfuse.analysis.statistics import Statistics
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.arrays import as_vector
from jaxfuse.ops.batch_norm import OP
from jaxfuse.ops.batch_norm_config import BatchNormConfig, PerChannelProgram
from jaxfuse.ops.batch_norm_grad import GradientConfig
from jaxfuse.patterns.batch_norm import gradient as batch_norm_grad
from jaxfuse.patterns.batch_norm.gradient import Gradient
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import Chain
from jaxfuse.program.graph import Emission, Graph, Node, Value, compute
from jaxfuse.program.liveness import FusedReader
from jaxfuse.program.site import Match, Refusal, Unfit
from jaxfuse.program.transposes import transposed

LARGEST_PROGRAM = 64  # nodes of per-channel arithmetic between the statistics and the result


class Unscaled(Unfit):
    """The walk ended before the variance was used: where it ended is the reason to name."""


class Site:
    """A value with batch statistics that the sum `node` is one of, the `chain` after it, and the gradient through both, if the program
    computes it: of that alone where the chain is empty."""

    def __init__(self, graph: Graph, node: Node, statistics: Statistics, gradient: Gradient | None, chain: Chain, unprofitable: Callable):
        self.graph, self.node, self.statistics, self.gradient, self.chain = graph, node, statistics, gradient, chain
        self.x, self.axis, self.unprofitable = statistics.x, statistics.axis, unprofitable
        # The kernels are channels-last, and so is what the fused ops around give and take: transposes between them vanish.
        self.order = channels_last(self.x.ndim, self.axis)
        self.label = chain.label_of_norm("bn")
        self.xla_fuses_neighbour = _xla_fuses_neighbour(chain, self.axis)
        self.derivative = self._derivative()
        self.saved = self._saved()

    def forward(self) -> Match:
        """Raises `Unfit` where no kernel takes the chain."""
        chain, derivative = self.chain, self.derivative
        self._require_its_own()
        program, parameters = cut_out(self.statistics, chain)
        operands = (self.x,) if chain.residual is None else (self.x, chain.residual)
        config = BatchNormConfig(self.x.ndim - 1, program, has_residual=chain.residual is not None,
                                 activation=chain.activation or NO_ACTIVATION, with_residuals=derivative is not None,
                                 always_masked=derivative is not None and derivative.masked)
        full = jax.ShapeDtypeStruct([self.x.shape[d] for d in self.order], self.x.dtype)
        types = (*[full for _ in operands], *[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in parameters])
        if self.xla_fuses_neighbour:
            cost = self.unprofitable("batch_norm", config, types, cost=batch_norm_grad.FUSED_BY_XLA)
            config = dataclasses.replace(config, xla_fuses_neighbour=bool(cost))
        require(OP.forward, config, types, self.unprofitable, "batch_norm", config, types)
        passes = 1 + len([n for n in chain.nodes if n.primitive != CAST])
        return Match(self.label, self.node, chain.nodes, (self._emission(config, parameters),), operands, passes * nbytes(self.x))

    def _require_its_own(self):
        """Raises `Unfit` for a chain that is no normalisation, or that adds what the kernel cannot."""
        chain = self.chain
        if not chain.has_scale:
            raise Unscaled("it is centered, not scaled")
        if chain.residual is None:
            return
        if chain.residual.dtype != self.x.dtype:
            raise Unfit(f"residual {chain.residual!r} is of another dtype than {self.x!r}")
        if uses(self.statistics, chain.residual, tuple(v for n in chain.nodes for v in n.outputs)):
            raise Unfit("the residual is computed from x's own statistics")

    def _emission(self, config: BatchNormConfig, parameters: list[Value]) -> Emission:
        chain, kept, full = self.chain, self.saved, [transposed(self.graph, self.x, self.order)]
        if chain.residual is not None and chain.residual_layout is not None:
            added, undo = to_layout(self.graph, chain.residual, chain.residual_layout, self.order)
            full.append(added)
            if self.derivative and self.derivative.has_residual:  # the gradient reads it too
                self.saved = (*self.saved, added)
        copies = (transposed(self.graph, chain.end, self.order),) if chain.layout.is_identity else ()  # channels-last
        moments = self.statistics.moments

        def run(read):
            first, *residual = map(read, full)
            y, mean, var, *saved = OP(config, first, *[chain.signed(undo(array)) for array in residual], *map(read, parameters))
            yield chain.end, chain.layout.place(y, self.order)
            yield from chain.masks_from(chain.layout.place(y, self.order))
            yield from zip(kept, saved[3:] if config.always_masked else saved)
            yield from zip(copies, (y,))
            for value, moment in moments.items():
                yield value, moment.of(mean, var).astype(value.dtype).reshape(value.shape)

        return Emission((*full, *parameters), (chain.end, *copies, *moments, *chain.masks, *kept), run)

    # --- the gradient

    @property
    def includes_activation(self) -> bool:
        """Whether the gradient is that of the chain's activation too, by a function of the activation's argument. What tells that, if it
        is no mask, adds the residual."""
        slope, chain = self.gradient and self.gradient.slope, self.chain
        if not (slope and chain.region and chain.activation) or chain.subtracts and not chain.activation.is_mask:
            return False
        return chain.region.start is slope.z and slope.is_of(chain.activation, chain.region)

    def _derivative(self) -> GradientConfig | None:
        """Where the passes of the gradient take the activation's derivative from, if they can begin before the activation."""
        chain = self.chain
        if chain.activation is None or not self.includes_activation:
            return None
        if chain.residual is not None and chain.activation.is_mask:  # less to read than the residual
            return GradientConfig(0, True)
        return GradientConfig(0, False, False, chain.activation, chain.residual is not None)

    def _saved(self) -> tuple[Value, ...]:
        """What the forward pass saves for it: the bits of the mask, or center, scale and offset."""
        channels = self.x.shape[self.axis]
        if self.derivative is None:
            return ()
        if self.derivative.masked:
            return (Value(jax.ShapeDtypeStruct((size(self.x) // max(1, channels), -(-channels // 8)), jnp.uint8)),)
        return tuple(Value(jax.ShapeDtypeStruct((channels,), jnp.float32)) for _ in range(3))

    def backward(self, gradient: Gradient) -> Match | Refusal:
        """The gradient of what is fused."""
        try:
            return batch_norm_grad.fused(self, gradient)
        except Unfit as unfit:
            return Refusal(self.label, self.node, (gradient.g, self.x), unfit.reason, "backward")


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


# --- arithmetic on one number for each channel --------------------------------------------------------------------


def uses(statistics: Statistics, value: Value, inner: tuple[Value, ...] = ()) -> bool:
    """Whether the value is computed from them, or from one of the values `inner`."""
    return depends_on([value], [*statistics.moments, *inner])


def cut_out(statistics: Statistics, chain: Chain):
    """(program, parameters): the arithmetic behind the chain's coefficients, cut at the statistics on one side and at
    whatever does not depend on them on the other. Raises `Unfit` where it is more than that."""
    moments, channels = statistics.moments, statistics.x.shape[statistics.axis]
    coefficients = [value for _, value in chain.affine]
    inside = cone(coefficients, lambda value: value not in moments and uses(statistics, value), LARGEST_PROGRAM)
    read = dict.fromkeys((*coefficients, *[v for n in inside for v in n.inputs]))
    parameters = [v for v in read if v.literal is None and v not in moments and v.producer not in inside]
    if len(inside) > LARGEST_PROGRAM or any(size(v) > channels for n in inside for v in n.outputs):
        raise Unfit("what comes between the statistics and the result is not arithmetic on one number for each channel")

    def program(mean, var, *arrays):
        made = {value: moment.of(mean, var).astype(value.dtype).reshape(value.shape) for value, moment in moments.items()}
        computed = dict(zip(coefficients, compute(coefficients, made | dict(zip(parameters, arrays)), {})))
        center, scale, offset = chain.coefficients(lambda value: as_vector(computed[value], (channels,)))
        zero = jnp.zeros((channels,), jnp.float32)
        return zero if center is None else center, zero + 1 if scale is None else scale, zero if offset is None else offset

    wide = jnp.promote_types(statistics.x.dtype, jnp.float32)
    types = [jax.ShapeDtypeStruct((channels,), wide)] * 2 + [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in parameters]
    return PerChannelProgram(program, types), parameters
