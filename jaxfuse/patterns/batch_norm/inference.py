"""Batch norm with given statistics that no convolution before it took, and what follows it: left to XLA, which makes one pass of it."""

from jaxfuse.analysis.axes import is_long
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.analysis.normal import ADD, CAST, NotPerChannel, constant, per_channel, size
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.dense.site import is_parameter
from jaxfuse.patterns.walk import Walk
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.site import Refusal
from jaxfuse.runtime.reasons import left_to_xla

FARTHEST = 6  # per-channel steps from the root of the variance to the value that it scales


def anchors(graph):
    """Roots of a parameter with epsilon added."""
    return [n for n in forward(graph).nodes if n.primitive in ("sqrt", "rsqrt") and _is_variance(n.inputs[0])]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields the row of each full-size value that the root scales."""
    part = forward(graph)
    for product in _products(node):
        x = next(v for v in product.inputs if size(v) == size(product.out))
        first, start = product, x
        if x.producer is not None and x.producer.primitive == "sub" and len(x.users) == 1:
            first, start = x.producer, x.producer.inputs[0]
        axis = _channel_axis(product, x)
        if axis is None or {first.index, product.index} & claimed or _follows_convolution(start):
            continue
        chains, stop = Walk(part, axis, claimed, name_activation).chains(start, first)
        chain = chains[-1]
        if product not in chain.nodes:
            yield Refusal("bn inference", node, (start,), stop.reason, nodes=(first, product))
            continue
        unfused = [stop.unfused] if stop.unfused else []
        pattern = "+".join([chain.label_of_norm("bn inference"), *unfused])
        yield Refusal(pattern, node, (start,), stop.reason if unfused else left_to_xla(), nodes=chain.nodes)


def _follows_convolution(value: Value) -> bool:
    """A convolution's own row says why it did not take the norm."""
    for _ in range(FARTHEST):
        node = value.producer
        full_size = [v for v in node.inputs if size(v) == size(value)] if node and len(node.outputs) == 1 else []
        if node and node.primitive == "conv_general_dilated":
            return True
        if len(full_size) != 1:
            return False
        value = full_size[0]
    return False


def _is_variance(value: Value) -> bool:
    node = value.producer
    small = [v for v in node.inputs if constant(v) is None] if node is not None and node.primitive in ADD else []
    return is_long(size(value)) and len(small) == 1 and is_parameter(small[0])


def _products(root: Node) -> list[Node]:
    """Products of the root, or of it times gamma, with something larger."""
    found: dict[Node, None] = {}
    values = {root.out}
    for _ in range(FARTHEST):
        users = [n for v in values for n in v.users if n.primitive in ("mul", "div", CAST, *RESHAPES)]
        found |= dict.fromkeys(n for n in users if n.primitive in ("mul", "div") and size(n.out) > size(root.out))
        values = {n.out for n in users if size(n.out) == size(root.out)}
    return sorted(found, key=lambda n: n.index)


def _channel_axis(product: Node, x: Value) -> int | None:
    """The axis along which the other factor has one number for each channel."""
    other = next(v for v in product.inputs if v is not x)
    axes = [axis for axis in range(x.ndim) if not isinstance(per_channel(other, x, axis), NotPerChannel)]
    return axes[0] if len(axes) == 1 else None
