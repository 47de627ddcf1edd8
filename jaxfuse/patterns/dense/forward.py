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
            yield from activation_grad(graph, part.original(layer.chain.region.start), layer.chain.activation)
    for gate in [gate for layer in layers for gate in _gates(part, layer, claimed)]:
        if row := _gated(part, gate, layers):
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


# --- gates -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gate:
    """A function of a layer's result that something is multiplied by: of what its chain gives, or of one half of that if the other
    `half` is multiplied by it. `nodes` and `steps` are those that are not in the chain."""

    layer: Layer
    value: Value
    nodes: tuple[Node, ...] = ()
    steps: str = ""
    half: Value | None = None
    reason: str = ""


def _gates(part: Part, layer: Layer, claimed: set[int]) -> Iterator[Gate]:
    end = layer.chain.end
    if layer.chain.activation:
        yield Gate(layer, end)
    elif len(end.users) == 1 and end.users[0].primitive == "split" and len(end.users[0].outputs) == 2:
        (split,) = end.users
        for half, other in (split.outputs, split.outputs[::-1]):
            chains, _ = Walk(part, half.ndim - 1, claimed, name_activation).chains(half)
            gates = [Gate(layer, chain.end, (split, *chain.nodes), f"+{chain.activation.name}", other)
                     for chain in chains if chain.activation and not chain.affine]
            yield from gates[-1:]
    for node in end.users:
        if len(node.inputs) == len(node.outputs) == 1:
            yield Gate(layer, node.out, (node,), reason=f"{node} is not a known activation")


def _gated(part: Part, gate: Gate, layers: list[Layer]) -> Row | None:
    """The row of act(x·w₁)·(x·w₂), or of act(u)·v where (u, v) is x·w split."""
    for product in gate.value.users if gate.layer in layers else ():
        if product.primitive != "mul" or product.inputs[0] is product.inputs[1]:
            continue
        other = product.inputs[product.inputs[0] is gate.value]
        linear = [s for s in layers if s is not gate.layer and s.chain.end is other][:1]
        if linear or other is gate.half:
            row = [gate.layer, *linear]
            nodes = (*[n for layer in row for n in layer.nodes], *gate.nodes, product)
            reason = gate.reason or read_elsewhere(part, gate.value, gate.value.users)
            return Row(f"{gate.layer.label}{gate.steps}+gate", row, nodes, reason, is_gated=True)
    return None
