"""Batch norm with given statistics that no convolution before it took, and what follows it: left to XLA, which makes one pass of it."""

from jaxfuse.analysis.axes import is_long
from jaxfuse.analysis.normal import ADD, channel_factor, constant, is_smaller, size
from jaxfuse.analysis.regions import cone
from jaxfuse.patterns.dense.site import is_parameter
from jaxfuse.patterns.walk import Walk
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.site import Refusal
from jaxfuse.runtime.reasons import left_to_xla

FARTHEST = 6  # steps from the convolution to what is normalised, and nodes from the root of the variance to what it scales


def anchors(graph):
    """Full-size values times the root of a parameter with epsilon added."""
    return [n for n in forward(graph).nodes if n.primitive in ("mul", "div") and _scaled(n)]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields the row of the value that is scaled."""
    if (scaled := _scaled(node)) is None:
        return
    (start, axis), first, part = scaled, node, forward(graph)
    if start.producer is not None and start.producer.primitive == "sub" and len(start.users) == 1:
        first, start = start.producer, start.producer.inputs[0]
    if first.index in claimed or _follows_convolution(start):
        return
    chains, stop = Walk(part, axis, claimed).chains(start, first)
    chain = chains[-1]
    if node not in chain.nodes:
        yield Refusal("bn inference", node, (start,), stop.reason, nodes=(first, node))
        return
    unfused = [stop.unfused] if stop.unfused else []
    pattern = "+".join([chain.label_of_norm("bn inference"), *unfused])
    yield Refusal(pattern, node, (start,), stop.reason if unfused else left_to_xla(), nodes=chain.nodes)


def _follows_convolution(value: Value) -> bool:
    """A convolution's own row says why it did not take the norm."""
    for _ in range(FARTHEST):
        node = value.producer
        if node is None or node.primitive == "conv_general_dilated":
            return node is not None
        full_size = [v for v in node.inputs if size(v) == size(value)]
        if len(full_size) != 1:
            return False
        (value,) = full_size
    return False


def _scaled(product: Node) -> tuple[Value, int] | None:
    """(the full-size value, its channel axis) if the other factor, one number for each channel, is made of such a root."""
    ways = {axis: scaled for axis in range(product.out.ndim) if (scaled := channel_factor(product, axis))}
    for axis, (x, vector) in ways.items() if len(ways) == 1 else ():
        alike = cone([vector], lambda value: size(value) == size(vector), FARTHEST)
        if is_smaller(vector, x) and any(map(_is_root, alike)):
            return x, axis
    return None


def _is_root(node: Node) -> bool:
    variance = node.inputs[0].producer if node.primitive in ("sqrt", "rsqrt") else None
    small = [v for v in variance.inputs if constant(v) is None] if variance and variance.primitive in ADD else []
    return is_long(size(node.out)) and len(small) == 1 and is_parameter(small[0])
