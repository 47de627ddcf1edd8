"""The user's own arithmetic between a batch norm's statistics and its result, cut out of the program."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import size
from jaxfuse.analysis.statistics import Statistics
from jaxfuse.ops.op import equally_varying
from jaxfuse.patterns.walk import Chain, as_vector, depends_on
from jaxfuse.program.graph import Graph, Node, Value, evaluate
from jaxfuse.program.site import Unfit

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


def uses(statistics: Statistics, value: Value, inner: tuple[Value, ...] = ()) -> bool:
    """Whether the value is computed from them, or from one of the values `inner`."""
    return depends_on([value], {id(v) for v in (*statistics.known, *inner)}, statistics.since)


def cut_out(statistics: Statistics, chain: Chain):
    """(program, parameters): the arithmetic behind the chain's coefficients, cut at the statistics on one side and at
    whatever does not depend on them on the other. Raises `Unfit` where it is more than that."""
    known, channels = statistics.known, statistics.x.shape[statistics.axis]
    parameters: dict[Value, None] = {}
    order: list[Node] = []
    reached: set[int] = set()

    def reach(value: Value):
        if value in known or value.literal is not None or value in parameters:
            return
        if not uses(statistics, value):
            parameters[value] = None
        elif (node := value.node).index not in reached:
            reached.add(node.index)
            for operand in node.inputs:
                reach(operand)
            order.append(node)

    for _, value in chain.affine:
        reach(value)
    if len(order) > LARGEST_PROGRAM or any(size(v) > channels for n in order for v in n.outputs):
        raise Unfit("what comes between the statistics and the result is not arithmetic on one number for each channel")
    given = list(parameters)

    def program(mean, var, *arrays):
        made: dict[Value, object] = dict(zip(given, arrays))

        def read(value):
            if value.literal is None and value not in made:
                made[value] = known[value].of(mean, var).astype(value.dtype).reshape(value.shape)
            return value.literal if value.literal is not None else made[value]

        for node in order:
            made |= zip(node.outputs, node.replay([read(v) for v in node.inputs]))
        center, scale, offset = chain.coefficients(lambda value: as_vector(read(value), (channels,)))
        zero = jnp.zeros((channels,), jnp.float32)
        return zero if center is None else center, zero + 1 if scale is None else scale, zero if offset is None else offset

    wide = jnp.promote_types(statistics.x.dtype, jnp.float32)
    types = [jax.ShapeDtypeStruct((channels,), wide)] * 2 + [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in given]
    return PerChannelProgram(program, types), given
