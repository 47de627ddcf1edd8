"""The user's own arithmetic between a batch norm's statistics and its result, cut out of the program."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.normal import size
from jaxfuse.analysis.regions import cone
from jaxfuse.analysis.statistics import Statistics
from jaxfuse.ops.op import equally_varying
from jaxfuse.patterns.walk import Chain, as_vector, depends_on
from jaxfuse.program.graph import Graph, Value, compute, evaluate
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
