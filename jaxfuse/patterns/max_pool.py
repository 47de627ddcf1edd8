"""Max pooling: one node, gained for its gradient, which XLA computes on a CPU by an arg-max and a scatter."""

import jax

from jaxfuse.graph import Emission, Node
from jaxfuse.match import Match, Refusal
from jaxfuse.ops.max_pool import OP, MaxPoolConfig


def anchors(graph):
    """lax.reduce_window of lax.max from -inf, however it is reached."""
    return [node for node in graph.nodes if node.primitive == "reduce_window_max"]


def match(graph, node: Node, claimed: set[int], measured):
    """Yields one Match or Refusal."""
    (x,) = node.inputs
    names = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
    *numbers, padding, base, window = (tuple(node.params[name]) for name in names)
    config = MaxPoolConfig(*numbers, tuple(map(tuple, padding)), base, window)
    types = (jax.ShapeDtypeStruct(x.shape, x.dtype),)
    kernel, reason = OP.forward.kernel(config, types)
    reason = reason or measured("max_pool", config, types)
    if reason:
        yield Refusal("max_pool", node, (x,), reason)
        return

    def run(read):
        return zip([node.out], OP(config, read(x)))

    yield Match("max_pool", node, (node,), (Emission((x,), (node.out,), run),), kernel.name, (x,), 0)
