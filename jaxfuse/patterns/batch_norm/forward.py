"""Training batch norm, residual add and activation: a value with batch statistics, and what is done to it with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import ADD, CAST, NotPerChannel, chosen, constant, is_square, per_channel, size, unwidened
from jaxfuse.analysis.layout import Layout, channels_last, is_reshape, to_layout, transposed
from jaxfuse.analysis.moments import Moments, reductions, shared_over
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.batch_norm import OP
from jaxfuse.ops.batch_norm_config import BatchNormConfig
from jaxfuse.ops.batch_norm_grad import GradientConfig
from jaxfuse.ops.op import equally_varying
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.batch_norm import gradient as batch_norm_grad
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import Chain, Walk, as_vector, depends_on, longest, require_batch_sharding
from jaxfuse.program.graph import Emission, Graph, Node, Value, evaluate
from jaxfuse.program.liveness import FusedReader
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.runtime.reasons import no_kernel

LARGEST_PROGRAM = 64  # nodes of per-channel arithmetic between the statistics and the result


class PerChannelProgram:
    """The user's own arithmetic from (mean, var, *parameters) to (center, scale, offset); equal if it reads the same."""

    def __init__(self, function, types):
        closed = jax.make_jaxpr(function)(*types)
        self.graph = Graph(closed)
        self.text = str(closed.jaxpr), tuple(np.asarray(c).tobytes() for c in closed.consts)

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


def anchors(graph):
    """Sums over some axes of values that are squared and summed over the same axes too; last first."""
    sums = [n for n in graph.nodes if n.primitive == "reduce_sum" and n.inputs[0].literal is None]
    summed = {(id(_squared(n.inputs[0])), n.params["axes"]) for n in sums}
    found = [n for n in sums if n.inputs[0].ndim >= 2 and (id(_unmasked(n.inputs[0])), n.params["axes"]) in summed
             and _squared(n.inputs[0]) is None]
    return list({id(_unmasked(n.inputs[0])): n for n in reversed(found)}.values())


def match(graph, node: Node, claimed: set[int], unprofitable):
    x = unwidened(chosen(unwidened(node.inputs[0])))
    if _unmasked(x) is not x:
        yield Refusal("bn", node, (x,), no_kernel(f"{x.producer} leaves elements out of the statistics"))
        return
    left = min((r.left for r in reductions(node.inputs[0]) if r.first is node and r.left), key=len, default=())
    if len(left) != 1 or left == (0,):  # rows of the batch, or groups: patterns/norm has them
        return
    x, axis = _unflattened(graph, x, *left)
    try:
        require_batch_sharding((x,))
    except Unfit as unfit:
        yield Refusal("bn", node, (x,), unfit.reason)
        return
    moments = Moments(x, axis)
    if not moments:
        name = shared_over(node.inputs[0])
        shared = no_kernel(f"its statistics are shared over the mesh axis {name!r}")
        yield Refusal("bn", node, (x,), shared if name else "its sums are not made into a mean and a variance")
        return
    plain = batch_norm_grad.find(graph, moments)
    for gradient in (*(batch_norm_grad.through_activation(graph, plain) if plain else ()), plain):
        ignored = frozenset(moments.nodes) | (gradient.nodes if gradient else frozenset())
        start, first = _first_step(graph, moments, ignored)
        if first is None:
            yield Refusal("bn", node, (x,), "nothing normalises it: no step on it uses its statistics")
            return
        chains, stop = Walk(graph, axis, claimed, name_activation, ignored).chains(start, first)
        found, chain, refused = longest(chains, x.dtype, lambda chain: _fused(graph, node, moments, gradient, chain, unprofitable))
        if gradient and gradient.slope and found and _is_grad_of(gradient.slope, chain):
            break
    if found:
        yield found
        if gradient:
            yield _backward(graph, node, gradient, found, chain, unprofitable)
    if refused and _label(refused[0]) != _label(chain) * bool(found):
        reason = stop.reason if isinstance(refused[1], Unscaled) else refused[1].reason
        row = UnfusedStep if found else Refusal
        yield row(_label(refused[0]), node, (x,), reason)
    elif stop.unfused:
        yield UnfusedStep(f"{_label(chain)}+{stop.unfused}", node, (x,), stop.reason)


def _unflattened(graph, x: Value, axis: int) -> tuple[Value, int]:
    """What is normalised: where x is that in another shape, which only its statistics are taken of, and its channel axis."""
    node = x.producer
    if node is None or not is_reshape(node):
        return x, axis
    source, layout = unwidened(node.inputs[0]), Layout.of(node.inputs[0].shape).then(node)
    own = next((d for d in range(source.ndim) if layout.axes(d) == (axis,)), None)
    if own is None:
        return x, axis
    moments = Moments(source, own)
    return (source, own) if moments and _first_step(graph, moments, frozenset(moments.nodes))[1] else (x, axis)


class Unscaled(Unfit):
    """The walk ended before the variance was used: where it ended is the reason to name."""


def _label(chain: Chain) -> str:
    """The per-channel steps of a chain that begins at a value with statistics are its normalisation."""
    return "+".join(["bn", *chain.after_affine])


def _first_step(graph, moments: Moments, ignored: frozenset[int]) -> tuple[Value, Node | None]:
    """Where x, or x cast to float32, first meets a number per channel that comes from its own statistics."""
    x = moments.x
    for value in (x, *[n.out for n in x.users if n.primitive == CAST]):
        for node in value.users:
            if node.primitive in ("sub", "mul", "div") and len(node.inputs) == 2 and node.index not in ignored:
                other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
                small = per_channel(other, value, moments.axis)
                if not isinstance(small, NotPerChannel) and depends_on([small], set(moments.known), _since(moments)):
                    if any(n.index not in ignored for n in node.out.users) or graph.is_returned(node.out):
                        return value, node
    return x, None


def _since(moments: Moments) -> int:
    return min(value.producer.index for value, _ in moments.known.values())


def _is_grad_of(slope, chain: Chain) -> bool:
    return chain.activation is not None and chain.region.start is slope.z and slope.is_of(chain.activation)


def _derivative_config(gradient, chain: Chain) -> GradientConfig | None:
    """How the passes of the gradient are told the activation's derivative, if they can begin before the activation."""
    if gradient is None or chain.activation is None:
        return None
    if gradient.slope and _is_grad_of(gradient.slope, chain):
        if chain.residual is not None and chain.activation.is_mask:  # less to read than the residual
            return GradientConfig(0, True)
        return GradientConfig(0, False, False, chain.activation, chain.residual is not None)
    return GradientConfig(0, True) if batch_norm_grad.mask_of(gradient, chain) is not None else None


def _backward(graph, node: Node, gradient, forward: Match, chain: Chain, unprofitable) -> Match | Refusal:
    emission, config = forward.emissions[0], _derivative_config(gradient, chain)
    kept = tuple(v for v in emission.defines if v.producer is None)
    residual = emission.needs[1:2] if config and config.has_residual else ()
    saved = batch_norm_grad.SavedActivation(config, (*kept, *residual)) if config else None
    beside = _xla_fuses_neighbour(chain, gradient.moments.axis)
    try:
        return batch_norm_grad.fused(graph, gradient, forward.pattern, node, saved, beside, unprofitable)
    except Unfit as unfit:
        return Refusal(forward.pattern, node, (gradient.g, gradient.moments.x), unfit.reason, "backward")


def _fused(graph, node: Node, moments: Moments, gradient, chain: Chain, unprofitable) -> Match:
    """Raises `Unfit` where no kernel takes the chain."""
    x, known = moments.x, set(moments.known)
    if not any(kind in ("mul", "div") for kind, _ in chain.affine):
        raise Unscaled("it is centered, not scaled")
    if chain.residual is not None:
        if chain.residual.dtype != x.dtype:
            raise Unfit(f"residual {chain.residual!r} is of another dtype than {x!r}")
        if depends_on([chain.residual], known | {id(v) for n in chain.nodes for v in n.outputs}, _since(moments)):
            raise Unfit("the residual is computed from x's own statistics")
    per_channel_program, parameters = _per_channel_program(moments, chain)
    derivative_config = _derivative_config(gradient, chain)
    # The kernels are channels-last, and so is what the fused ops around it give and take: transposes between them vanish.
    order = channels_last(x.ndim, moments.axis)
    full: tuple[Value, ...] = (transposed(graph, x, order),)
    undo = None
    if chain.residual is not None:
        added, undo = to_layout(graph, chain.residual, chain.residual_layout, order)
        full = *full, added
    config = BatchNormConfig(x.ndim - 1, per_channel_program, True, chain.residual is not None, chain.activation or NO_ACTIVATION,
                             derivative_config is not None, derivative_config is not None and derivative_config.masked)
    one = jax.ShapeDtypeStruct([x.shape[d] for d in order], x.dtype)
    types = (*[one] * len(full), *[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in parameters])
    if _xla_fuses_neighbour(chain, moments.axis):
        cost = unprofitable("batch_norm", config, types, cost=batch_norm_grad.FUSED_BY_XLA)
        config = dataclasses.replace(config, xla_fuses_neighbour=bool(cost))
    require(OP.forward, config, types, unprofitable, "batch_norm", config, types)
    channels_last_copy = transposed(graph, chain.end, order) if chain.layout == Layout.of(x.shape) else None

    kept = _kept_for(derivative_config, size(x), x.shape[moments.axis])

    def run(read):
        first, *residual = map(read, full)
        y, mean, var, *saved = OP(config, first, *map(undo, residual), *map(read, parameters))
        yield chain.end, chain.layout.place(y, order)
        yield from chain.masks_from(chain.layout.place(y, order))
        yield from zip(kept, saved[3:] if config.keeps_mask else saved)
        if channels_last_copy:
            yield channels_last_copy, y
        for value, formula in moments.known.values():
            yield value, formula(mean, var).astype(value.dtype).reshape(value.shape)

    bytes_saved = np.dtype(x.dtype).itemsize * size(x) * (1 + 2 * len([n for n in chain.nodes if n.primitive != CAST]) // 2)
    operands = (x, chain.residual) if chain.residual is not None else (x,)
    served = (value for value, _ in moments.known.values())
    ends = (chain.end, channels_last_copy) if channels_last_copy else (chain.end,)
    emission = Emission((*full, *parameters), (*ends, *served, *chain.masks, *kept), run)
    return Match(_label(chain), node, chain.nodes, (emission,), operands, bytes_saved)


def _xla_fuses_neighbour(chain: Chain, axis: int) -> bool:
    """Whether it reads or is read by what XLA can compute along with it and never writes: a max pool of it, whose gradient is
    elementwise in the winners, or, of two normalised values that are added, the other one."""
    if any(node.primitive == "reduce_window_max" for node in chain.end.users):
        return True
    if chain.residual is not None:
        return _is_normalised(chain.residual, chain.residual_layout.axes(axis))
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


def _kept_for(derivative_config: GradientConfig | None, elements: int, channels: int) -> list[Value]:
    """What the forward pass saves for it: the bits of the mask, or center, scale and offset."""
    if derivative_config is None:
        return []
    if derivative_config.masked:
        return [Value(jax.ShapeDtypeStruct((elements // max(1, channels), -(-channels // 8)), jnp.uint8))]
    return [Value(jax.ShapeDtypeStruct((channels,), jnp.float32)) for _ in range(3)]


def _per_channel_program(moments: Moments, chain: Chain):
    """(program, parameters): the arithmetic behind the chain's coefficients, cut at the statistics on one side and at
    whatever does not depend on them on the other. Raises `Unfit` where it is more than that."""
    known, channels = moments.known, moments.x.shape[moments.axis]
    parameters: dict[int, Value] = {}
    order: list[Node] = []
    reached: set[int] = set()

    def reach(value: Value):
        if id(value) in known or value.literal is not None or id(value) in parameters:
            return
        if not depends_on([value], set(known), _since(moments)):
            parameters[id(value)] = value
        elif value.producer.index not in reached:
            reached.add(value.producer.index)
            for operand in value.producer.inputs:
                reach(operand)
            order.append(value.producer)

    for _, value in chain.affine:
        reach(value)
    if len(order) > LARGEST_PROGRAM or any(size(v) > channels for n in order for v in n.outputs):
        raise Unfit("what comes between the statistics and the result is not arithmetic on one number for each channel")
    given = list(parameters.values())

    def program(mean, var, *arrays):
        made = {id(v): array for v, array in zip(given, arrays)}

        def read(value):
            if value.literal is None and id(value) not in made:
                made[id(value)] = known[id(value)][1](mean, var).astype(value.dtype).reshape(value.shape)
            return value.literal if value.literal is not None else made[id(value)]

        for node in order:
            made |= zip(map(id, node.outputs), node.replay([read(v) for v in node.inputs]))
        center, scale, offset = chain.coefficients(lambda value: as_vector(read(value), channels))
        zero = jnp.zeros((channels,), jnp.float32)
        return zero if center is None else center, zero + 1 if scale is None else scale, zero if offset is None else offset

    wide = jnp.promote_types(moments.x.dtype, jnp.float32)
    types = [jax.ShapeDtypeStruct((channels,), wide)] * 2 + [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in given]
    return PerChannelProgram(program, types), given


def _unmasked(value: Value) -> Value:
    """What statistics with a mask are of: select(mask, x, 0)."""
    value = unwidened(value)
    node = value.producer
    if node is not None and node.primitive == "select_n" and len(node.inputs) == 3:
        for zero, kept in (node.inputs[1:], node.inputs[:0:-1]):
            if constant(zero) == 0 and constant(kept) is None:
                return unwidened(kept)
    return value


def _squared(value: Value) -> Value | None:
    """What `value` is the square of (of it, or of it less its mean), casts and masks not counted."""
    node = _unmasked(value).producer
    if node is None or not node.inputs or not is_square(node, node.inputs[0]):
        return None
    base = node.inputs[0]
    if base.producer is not None and base.producer.primitive == "sub":
        base = base.producer.inputs[0]
    return unwidened(base)
