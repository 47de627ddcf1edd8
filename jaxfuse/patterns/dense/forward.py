"""Dense layers: a contraction of an activation with a weight, and what follows it. In a differentiated program the row of a layer's
activation gradient stands beside it, where no kernel has taken it (`activation_grad`, `gradient`)."""

from jaxfuse.patterns.activation_grad import activation_grad
from jaxfuse.patterns.dense.site import batch_axes, is_product, layer_of
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Graph, Node


def anchors(graph: Graph):
    """Last first: where two layers meet in a residual add, the later one takes the add."""
    return [n for n in reversed(forward(graph).nodes) if is_product(n) and not batch_axes(n) and n.out.ndim]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields the rows of the layer, and that of its activation's gradient."""
    layer = layer_of(graph, forward(graph), node, claimed)
    chain = layer.chains[-1]
    if chain.activation and chain.region:
        yield from activation_grad(graph, layer.part.original(chain.region.start), chain.activation, chain.region)
    yield from layer.rows((layer.x, layer.w), unprofitable)
