"""A factor of each channel of each image, as squeeze-and-excitation has it, that a layer with a packed filter takes in with its input."""

from typing import NamedTuple

from jaxfuse.program.graph import Graph, Node, Value


class Gate(NamedTuple):
    """x·factors, which nothing but the layer reads."""

    x: Value
    factors: Value

    def of_images(self, factors):
        """The factors as (images, channels)."""
        return factors.reshape(self.x.shape[0], self.x.shape[-1])


def gate_of(graph: Graph, layer: Node) -> Gate | None:
    """What the layer, a convolution of channels last, reads in place of its input; None where that is no such product."""
    product = layer.inputs[0].producer
    if product is None or product.primitive != "mul" or len(product.out.users) != 1 or graph.is_returned(product.out):
        return None
    for x, given in (product.inputs, reversed(product.inputs)):
        factors = _repeated(given)
        per_channel = (*x.shape[:1], *[1] * (x.ndim - 2), *x.shape[-1:])
        if factors is None or x.dtype != factors.dtype or x.dtype != product.out.dtype:
            continue
        if factors.shape == per_channel != x.shape == product.out.shape:
            return Gate(x, factors)
    return None


def _repeated(value: Value) -> Value | None:
    """The value itself, or what it repeats along axes of one place; None for a number of the program's text."""
    node = value.producer
    if node is not None and node.primitive == "broadcast_in_dim":
        repeated = node.inputs[0]
        same_axes = node.params["broadcast_dimensions"] == tuple(range(value.ndim)) and repeated.ndim == value.ndim
        value = repeated if same_axes else value
    return value if value.literal is None else None
