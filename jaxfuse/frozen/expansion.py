"""A 1×1 convolution that makes many channels of few, as inverted residuals have it, for the depthwise one behind it."""

from jaxfuse.ops.conv import expanded
from jaxfuse.program.graph import Graph, Node


def expansion_of(graph: Graph, node: Node) -> Node | None:
    """The 1×1 convolution whose output the node, a depthwise convolution, alone reads; None where there is none, or the two are not
    computed together."""
    before = node.inputs[0].producer
    if node.primitive != "jaxfuse_conv" or before is None or before.primitive != "jaxfuse_conv":
        return None
    if len(before.out.users) != 1 or graph.is_returned(before.out) or before.out not in node.inputs[:1]:
        return None
    w, own = before.inputs[1], node.inputs[1]
    spec = before.params["config"].rhs_spec
    is_one_tap = all(w.shape[d] == 1 for d in spec[2:])
    refused = expanded.refuse_configs(before.params["config"], node.params["config"], own)
    return before if is_one_tap and not refused else None
