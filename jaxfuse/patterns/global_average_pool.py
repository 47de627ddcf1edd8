"""Global average pooling: one node, gained where XLA casts the whole image first, or sums it slowly."""

import math

from jaxfuse.analysis.layout import is_reshape
from jaxfuse.analysis.normal import scale_factor, unwidened
from jaxfuse.ops.batch_axes import reshaped
from jaxfuse.ops.global_average_pool import OP, GlobalAveragePoolConfig
from jaxfuse.ops.stage import type_of
from jaxfuse.patterns.kernel import require, require_batch_sharding
from jaxfuse.program.elementwise import is_elementwise
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit
from jaxfuse.runtime.reasons import LeftToXla, Unprofitable


def anchors(graph):
    """Sums over all axes between those of a batch and the channels."""
    return [node for node in graph.nodes if node.primitive == "reduce_sum" and _is_over_places(node)]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal where the sum becomes a mean and XLA has no loop to take it into."""
    x, mean = unwidened(node.inputs[0]), _mean(graph, node)
    if mean is None or _is_made_in_a_loop(graph, x):
        return
    config, types = GlobalAveragePoolConfig(node.params["axes"][0]), (type_of(x.aval),)
    try:
        require_batch_sharding((x,))
        require(OP.forward, config, types, unprofitable, "global_average_pool", config, types)
    except Unfit as unfit:
        reason = LeftToXla(unfit.reason) if isinstance(unfit.reason, Unprofitable) else unfit.reason  # no other spelling would be fused
        yield Refusal("global_average_pool", node, (x,), reason)
        return

    def pool(x):
        return [reshaped(y.astype(mean.dtype), mean.shape) for y in OP(config, x)]

    yield Match("global_average_pool", node, (node, mean.node), (Emission.of((x,), (mean,), pool),), (x,), 0)


def _is_over_places(node: Node) -> bool:
    axes, rank = node.params["axes"], node.inputs[0].ndim
    return 0 < axes[0] and tuple(axes) == tuple(range(axes[0], rank - 1)) if axes else False


def _mean(graph: Graph, total: Node) -> Value | None:
    """The sum over how many numbers it is of, reshaped or not; None: it is not divided, or read otherwise too."""
    count = math.prod(total.inputs[0].shape[d] for d in total.params["axes"])
    value = total.out
    while len(value.users) == 1 and not graph.is_returned(value):
        (user,) = value.users
        if not is_reshape(user):
            factor = scale_factor(user, value)
            return user.out if factor is not None and math.isclose(factor * count, 1, rel_tol=1e-6) else None
        value = user.out
    return None


def _is_made_in_a_loop(graph: Graph, x: Value) -> bool:
    """Whether XLA makes x, which nobody else reads, number by number: it adds such numbers as it makes them."""
    is_read_once = len(x.users) == 1 and not graph.is_returned(x)
    return is_read_once and x.producer is not None and is_elementwise(x.producer) and x not in graph.marks.replaced
