"""Dense layers: a contraction of an activation with a weight, and what follows it.

Layers that read one input are one site: act(x·w₁)·(x·w₂) is a gated layer, equal epilogues are "dense+bias x3" (query, key
and value). In a differentiated program the row of a layer's activation gradient stands beside it, where no kernel has taken
it (`activation_grad`, `gradient`).
"""

import dataclasses
from collections.abc import Iterator

from jaxfuse.patterns.activation_grad import activation_grad
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.dense.site import Layer, batch_axes, is_product, layer_of, siblings
from jaxfuse.patterns.walk import Walk, read_elsewhere
from jaxfuse.program.autodiff import Subgraph, forward
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Match, Refusal, UnfusedStep

Part = Graph | Subgraph


def anchors(graph: Graph):
    """Last first: where two layers meet in a residual add, the later one takes the add."""
    return [n for n in reversed(forward(graph).nodes) if is_product(n) and not batch_axes(n) and n.out.ndim]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields the rows of all layers that read this one's input, one for each group."""
    part = forward(graph)
    layers = [layer_of(graph, part, n, claimed) for n in siblings(node) if n.index not in claimed]
    for layer in layers:
        if layer.chain.activation:
            yield from activation_grad(graph, part.original(layer.chain.region.start), layer.chain.activation, layer.chain.region)
    for row in [row for layer in layers for row in _gated(part, layer, layers, claimed)]:
        if all(layer in layers for layer in row.layers):
            layers = [layer for layer in layers if layer not in row.layers]
            yield from _found(row, unprofitable)
    groups: dict[tuple, list[Layer]] = {}
    for layer in layers:  # a query's scale is no reason to compute it apart from key and value
        steps = layer.chain.steps
        alike = steps[:-1] if steps[-1:] == ("scale",) else steps
        groups.setdefault((alike, layer.stop if layer.stop.unfused else None), []).append(layer)
    for (_, stop), group in groups.items():
        group = sorted(group, key=lambda layer: len(layer.label))
        label, reason = (f"{group[0].label}+{stop.unfused}", stop.reason) if stop else (group[0].label, "")
        yield from _found(Row(label, group, tuple(n for layer in group for n in layer.nodes), reason), unprofitable)


@dataclasses.dataclass(frozen=True)
class Row:
    """Layers that are one site; of a gated one `nodes` hold the gate too. `reason` says what keeps a part of it, that `label` names
    as well, from being fused."""

    label: str
    layers: list[Layer]
    nodes: tuple[Node, ...]
    reason: str
    is_gated: bool = False


def _found(row: Row, unprofitable):
    """Yields the Match or the Refusal of a row of layers, and a Refusal for the step that was not taken."""
    first, operands = row.layers[0].node, (row.layers[0].x, *[layer.w for layer in row.layers])
    count = f" x{len(row.layers)}" if len(row.layers) > 1 and not row.is_gated else ""
    fused = [(layer, *layer.longest(unprofitable)) for layer in row.layers]
    unfit = next((refused[1] for _, emission, _, refused in fused if emission is None and refused), None)
    if unfit:
        yield Refusal(row.label + count, first, operands, row.reason or unfit.reason, nodes=row.nodes)
        return
    whole = row.is_gated and not row.reason
    name = row.label if whole else fused[0][2].label("dense") + count
    nodes = row.nodes if whole else tuple(n for layer, _, chain, _ in fused for n in layer.nodes_of(chain))
    emissions = tuple(emission for _, emission, _, _ in fused if emission)
    yield Match(name, first, nodes, emissions, operands, sum(layer.bytes_saved(chain) for layer, _, chain, _ in fused))
    if row.reason:
        yield UnfusedStep(row.label + count, first, operands, row.reason, nodes=row.nodes)


def _gated(part: Part, layer: Layer, layers: list[Layer], claimed: set[int]) -> Iterator[Row]:
    """The rows of act(x·w₁)·(x·w₂), or of act(u)·v where (u, v) is x·w split, in which this layer makes the gate act(…)."""
    end = layer.chain.end

    def rows(gate: Value, nodes: tuple[Node, ...] = (), steps: str = "", half: Value | None = None, reason: str = "") -> Iterator[Row]:
        """`nodes` and `steps` make the gate of what the chain gives, or of one half of that; `half` is the other."""
        for product in gate.users:
            if product.primitive == "mul" and product.inputs[0] is not product.inputs[1]:
                other = product.other_input(gate)
                row = [layer, *[s for s in layers if s is not layer and s.chain.end is other][:1]]
                if len(row) > 1 or other is half:
                    inside = (*[n for layer in row for n in layer.nodes], *nodes, product)
                    yield Row(f"{layer.label}{steps}+gate", row, inside, reason or read_elsewhere(part, gate, gate.users), is_gated=True)

    if layer.chain.activation:
        yield from rows(end)
    elif len(end.users) == 1 and end.users[0].primitive == "split" and len(end.users[0].outputs) == 2:
        (split,) = end.users
        for half, other in (split.outputs, split.outputs[::-1]):
            chains, _ = Walk(part, half.ndim - 1, claimed, name_activation).chains(half)
            activated = [(chain, chain.activation.name) for chain in chains if chain.activation and not chain.affine]
            for chain, name in activated[-1:]:
                yield from rows(chain.end, (split, *chain.nodes), f"+{name}", other)
    for node in end.users:
        if len(node.inputs) == len(node.outputs) == 1:
            yield from rows(node.out, (node,), reason=f"{node} is not a known activation")
