"""Dense layers: a contraction of an activation with a weight, and what follows it.

Layers that read one input are one site: act(x·w₁)·(x·w₂) is a gated layer, equal epilogues are "dense+bias x3" (query, key
and value). In a differentiated program the row of a layer's activation gradient stands beside it, where no kernel has taken
it (`activation_grad`, `gradient`).
"""

import dataclasses

from jaxfuse.analysis.canonical import ADD, CAST, NotPerChannel, per_channel, varying_axes
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.patterns.activation_grad import activation_grad
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.dense import site as dense_site
from jaxfuse.patterns.walk import Chain, WalkEnd, Walk
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Node, Value

REARRANGED = (*RESHAPES, CAST, "transpose", "slice", "split", "concatenate")
FARTHEST_PARAMETER = 8  # casts, reshapes, slices between a parameter and where it is used


@dataclasses.dataclass
class Layer:
    """One dense layer: y[.., axes] = x·w, `start` being y with its transposes absorbed (`order` says which axis of y each of
    its axes is), and what the walk made of it."""

    node: Node
    x: Value
    w: Value
    weight_left: bool
    start: Value
    order: tuple[int, ...]
    transposes: tuple[Node, ...]
    chains: list[Chain]
    stop: WalkEnd

    chain = property(lambda self: self.chains[-1])
    preactivation = property(lambda self: next(c.end for c in reversed(self.chains) if not c.activation))

    label = property(lambda self: dense_site.label_of(self.chain))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Less casts at the end: with these the norm that follows begins."""
        nodes = [self.node, *self.transposes, *self.chain.nodes]
        while nodes[-1].primitive == CAST:
            nodes.pop()
        return tuple(nodes)


class DenseWalk(Walk):
    """A walk whose channels may be several trailing axes, as where a layer makes [.., heads, depth]."""

    def __init__(self, *args, channel_axes: set[int]):
        super().__init__(*args)
        self.channel_axes = channel_axes

    def _affine(self, chain: Chain, node: Node) -> Chain | WalkEnd:
        step = super()._affine(chain, node)
        if not isinstance(step, WalkEnd) or len(node.inputs) != 2 or node.primitive not in (*ADD, "mul"):
            return step
        other = node.inputs[1] if node.inputs[0] is chain.end else node.inputs[0]
        if node.primitive in ADD and len(self.channel_axes) > 1 and varying_axes(other) <= self.channel_axes:
            small = per_channel(other, chain.end, tuple(sorted(self.channel_axes)))
            small = other if isinstance(small, NotPerChannel) else small
            return dataclasses.replace(chain, end=node.out, nodes=(*chain.nodes, node), affine=(*chain.affine, ("add", small)))
        if node.primitive == "mul" and other.shape == chain.end.shape and varying_axes(other) > self.channel_axes:
            return WalkEnd(f"{node} multiplies by another full-size value")  # a gate, a mask: not a missed scale
        return step


def anchors(graph):
    """Last first: where two layers meet in a residual add, the later one takes the add."""
    return [n for n in reversed(forward(graph).nodes) if is_product(n) and not batch_axes(n) and n.out.ndim]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields the rows of all layers that read this one's input, one for each group."""
    part = forward(graph)
    layers = [layer_of(part, n, claimed) for n in _siblings(node) if n.index not in claimed]
    activated = [layer for layer in layers if layer.chain.activation]
    for layer in activated:
        yield from activation_grad(graph, layer.preactivation, layer.chain.activation)
    rows = [_gated(part, layer, layers) for layer in activated]
    rows += [_half_gated(part, layer, layers, claimed) for layer in layers[:] if not layer.chain.activation and layer in layers]
    groups: dict[tuple, list[Layer]] = {}
    for layer in layers:  # a query's scale is no reason to compute it apart from key and value
        groups.setdefault((layer.label.removesuffix("+scale"), layer.stop if layer.stop.unfused else None), []).append(layer)
    rows += [_row(sorted(group, key=lambda layer: len(layer.label))) for group in groups.values()]
    for row in filter(None, rows):
        yield from dense_site.found(graph, part, row, unprofitable)


@dataclasses.dataclass(frozen=True)
class Row:
    """Layers that are one site; of a gated one `nodes` hold the gate too. `reason` says what keeps a part of it from being
    fused, `unfused` what part."""

    label: str
    layers: tuple[Layer, ...]
    reason: str
    unfused: str
    count: str
    nodes: tuple[Node, ...]
    is_gated: bool

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.layers[0].x, *[layer.w for layer in self.layers]


def _row(group: list[Layer]) -> Row:
    """Layers with equal epilogues."""
    first = group[0]
    count = f" x{len(group)}" if len(group) > 1 else ""
    unfused, reason = (f"+{first.stop.unfused}", first.stop.reason) if first.stop.unfused else ("", "")
    return Row(first.label, tuple(group), reason, unfused, count, tuple(n for layer in group for n in layer.nodes), False)


def _gated_row(group: list[Layer], steps: str, reason: str, nodes: tuple[Node, ...]) -> Row:
    """`steps` are those of the first layer's activation where it is not in its chain; `nodes` those between and after them."""
    claims = (*[n for layer in group for n in layer.nodes], *nodes)
    return Row(f"{group[0].label}{steps}+gate", tuple(group), reason, "", "", claims, True)


# --- one layer ---------------------------------------------------------------------------------------------------


def layer_of(part, node: Node, claimed: set[int]) -> Layer:
    lhs, rhs = node.inputs
    left = _free_axes_on_the_left(node)
    start, order, transposes = _transposed(node)
    weight_left = _weight_is_left(node, order)
    produced = range(left) if weight_left else range(left, node.out.ndim)
    axes = {order.index(axis) for axis in produced}
    walk = DenseWalk(part, max(axes, default=start.ndim - 1), claimed, name_activation, channel_axes=axes)
    chains, stop = walk.chains(start)
    x, w = (rhs, lhs) if weight_left else (lhs, rhs)
    return Layer(node, x, w, weight_left, start, tuple(order), transposes, chains, stop)


def _transposed(node: Node) -> tuple[Value, list[int], tuple[Node, ...]]:
    """(the layer's output after transposes, which axis of the contraction each of its axes is, the transposes)."""
    value, order, nodes = node.out, list(range(node.out.ndim)), []
    while len(value.users) == 1 and value.users[0].primitive == "transpose":
        nodes.append(value.users[0])
        order = [order[i] for i in nodes[-1].params["permutation"]]
        value = nodes[-1].out
    return value, order, tuple(nodes)


def _weight_is_left(node: Node, order: list[int]) -> bool:
    """w·x instead of x·w: what comes from the left operand is made the last axis, or has a bias, or is the only parameter."""
    left = _free_axes_on_the_left(node)
    if left in (0, node.out.ndim):
        return left != 0
    if order != sorted(order):
        return order[-1] < left
    for user in node.out.users:
        if user.primitive in ADD:
            along = [axes for v in user.inputs if v is not node.out and len(axes := varying_axes(v)) == 1]
            if along:
                return left == 1 and along[0] == {0}
    lhs, rhs = node.inputs
    return lhs.ndim == 2 and is_parameter(lhs) and not is_parameter(rhs)


def _free_axes_on_the_left(node: Node) -> int:
    (contracted, _), _ = node.params["dimension_numbers"]
    return node.inputs[0].ndim - len(contracted)


def is_parameter(value: Value) -> bool:
    """Whether the value is an input or a constant of the program, rearranged."""
    for _ in range(FARTHEST_PARAMETER):
        if value.producer is None:
            return True
        if value.producer.primitive not in REARRANGED:
            return False
        value = value.producer.inputs[0]
    return False


def is_product(node: Node) -> bool:
    """A dot_general that contracts something; einsum writes elementwise products as one that does not."""
    return node.primitive == "dot_general" and bool(node.params["dimension_numbers"][0][0])


def batch_axes(node: Node) -> tuple[int, ...]:
    return tuple(node.params["dimension_numbers"][1][0])


def _siblings(node: Node) -> list[Node]:
    """The layers that contract the same axes of the same input, in program order."""
    side = int(_weight_is_left(node, _transposed(node)[1]))
    contracted = node.params["dimension_numbers"][0]
    return [n for n in node.inputs[side].users if is_product(n) and not batch_axes(n) and n.inputs[side] is node.inputs[side]
            and n.params["dimension_numbers"][0][side] == contracted[side]]


# --- gates -------------------------------------------------------------------------------------------------------


def _gated(part, layer: Layer, layers: list[Layer]) -> Row | None:
    """The row of act(x·w₁)·(x·w₂), or of act(u)·v where (u, v) is x·w split; takes its layers out of `layers`."""
    end = layer.chain.end
    for product in [n for n in end.users if n.primitive == "mul" and n.inputs[0] is not n.inputs[1]]:
        other = product.inputs[1] if product.inputs[0] is end else product.inputs[0]
        linear = next((s for s in layers if s is not layer and s.chain.end is other), None)
        if linear:
            layers.remove(layer)
            layers.remove(linear)
            return _gated_row([layer, linear], "", _read_elsewhere(part, end, product), (product,))
    return None


def _half_gated(part, layer: Layer, layers: list[Layer], claimed: set[int]) -> Row | None:
    """The row of one contraction whose result is split into act(u)·v, or of a gate whose function is none that we know."""
    users = layer.chain.end.users
    if len(users) == 1 and users[0].primitive == "split" and len(users[0].outputs) == 2:
        halves = users[0].outputs
        for half, other in (halves, halves[::-1]):
            chains, _ = Walk(part, half.ndim - 1, claimed, name_activation).chains(half)
            ends = [chain for chain in chains if chain.activation and not chain.affine]
            for product in ends[-1].end.users if ends else ():
                if product.primitive == "mul" and other in product.inputs:
                    layers.remove(layer)
                    reason = _read_elsewhere(part, ends[-1].end, product)
                    return _gated_row([layer], f"+{ends[-1].activation.name}", reason, (users[0], *ends[-1].nodes, product))
    for product in [n for n in users if n.primitive == "mul"]:
        gate = next((v.producer for v in product.inputs if v is not layer.chain.end), None)
        source = next((s for s in layers if s is not layer and gate in s.chain.end.users and len(gate.inputs) == 1), None) if gate else None
        if gate and source:
            layers.remove(layer)
            layers.remove(source)
            return _gated_row([source, layer], "", f"{gate} is not a known activation", (gate, product))
    return None


def _read_elsewhere(part, value: Value, node: Node) -> str:
    if part.is_returned(value):
        return f"{value!r} is returned by the program"
    others = [n for n in value.users if n is not node]
    return f"{value!r} is read {len(others) + 1} times: by {others[0]} too" if others else ""
