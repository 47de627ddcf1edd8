"""Which part of a program autodiff made: the transposed nodes, known by their name stacks, and what only they read.

A pattern of the forward pass looks at `forward(graph)`, where no value has a reader in the backward pass: such a reader
is served by the fused op's own backward. A pattern of the backward pass starts from `backward(graph)`.
"""

import functools
from typing import NamedTuple

from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.liveness import FusedReader

RECOMPUTED = "rematted_computation"  # in the name stack of what jax.checkpoint computes again


class Subgraph:
    """Some nodes of a graph, with values of their own, whose users are these nodes and fused ops. Indices are
    the graph's."""

    def __init__(self, graph: Graph, nodes: list[Node], outputs: list[Value]):
        self.outer = graph.outer
        copies: dict[Value, Value] = {}
        self._originals: dict[Value, Value] = {}

        def copy(value: Value) -> Value:
            if value not in copies:
                copies[value] = made = Value(value.aval, literal=value.literal)
                made.users += filter(_is_fused, value.users)
                self._originals[made] = value
            return copies[value]

        self.inputs = [copy(value) for value in graph.inputs]
        self.nodes = []
        for node in nodes:
            own = node.with_inputs([copy(v) for v in node.inputs])
            for value, made in zip(node.outputs, own.outputs):
                copies[value] = made
                self._originals[made] = value
                made.users += filter(_is_fused, value.users)
            self.nodes.append(own)
        self._by_index = {node.index: node for node in self.nodes}
        self.outputs = [copy(value) for value in outputs]
        self.returned = frozenset(self.outputs)

    def is_returned(self, value: Value) -> bool:
        return value in self.returned

    def node_in_subgraph(self, node: Node) -> Node | None:
        """This part's node for one of the graph's."""
        return self._by_index.get(node.index)

    def original(self, value: Value) -> Value:
        """The graph's own value; what is not this part's stays as it is."""
        return self._originals.get(value, value)


def forward(graph: Graph) -> Graph | Subgraph:
    """What autodiff did not add; the graph itself if it added nothing."""
    return _split(graph).forward or graph


def recomputed(graph: Graph) -> Graph | Subgraph:
    """The same with all that `jax.checkpoint` computes again, be it for the backward pass alone: there a value may have no reader."""
    return _split(graph).recomputed or graph


def backward(graph: Graph) -> frozenset[int]:
    """Indices of the transposed nodes."""
    return _split(graph).transposed


class Parts(NamedTuple):
    """None: the graph itself."""

    forward: Subgraph | None
    recomputed: Subgraph | None
    transposed: frozenset[int]


def _split(graph: Graph) -> Parts:
    if graph.marks.parts is None:
        # bodies of transposed loops carry no transform names of their own
        is_inside = graph.outer is not None and graph.outer[1].index in backward(graph.outer[0])
        stacks = {n.index: f"{_text(n.name_stack)}/{_text(n.eqn.source_info.name_stack)}" for n in graph.nodes}
        transposed = frozenset(i for i, stack in stacks.items() if "transpose(" in stack or is_inside and RECOMPUTED not in stack)
        outputs = [v for i, v in enumerate(graph.outputs) if not _only_for_backward(graph, i)]
        again = frozenset(i for i, stack in stacks.items() if RECOMPUTED in stack) - transposed
        part = None
        if transposed or len(outputs) < len(graph.outputs):
            part = Subgraph(graph, _live(graph, transposed, outputs), outputs)
        whole = Subgraph(graph, _live(graph, transposed, outputs, again), outputs) if part and again else part
        graph.marks.parts = Parts(part, whole, transposed)
    return graph.marks.parts


def _is_fused(node) -> bool:
    """A fused op of the forward pass, among the users of what it reads."""
    return isinstance(node, FusedReader) and node.match.direction == "forward"


@functools.lru_cache(4096)
def _text(name_stack) -> str:
    return str(name_stack)


def _only_for_backward(graph: Graph, i: int) -> bool:
    """Whether the i-th output of a loop's body is there for the transposed loop only."""
    if graph.outer is None or graph.outer[1].primitive != "scan":
        return False
    outer, node = graph.outer
    value = node.outputs[i]
    return bool(value.users) and not outer.is_returned(value) and all(n.index in backward(outer) for n in value.users)


def _live(graph: Graph, transposed: frozenset[int], outputs: list[Value], also: frozenset[int] = frozenset()) -> list[Node]:
    """Nodes that are not transposed and that something other than the backward pass reads, and `also`. Contractions stay: what
    `jax.checkpoint` computes again is only for the backward pass, but a layer all the same."""
    returned, live = set(outputs), set()
    for node in reversed(graph.nodes):
        if (
            node.index not in transposed
            and node.index not in graph.marks.fused_away
            and (
                node.eqn.effects
                or node.primitive == "dot_general"
                or node.index in also
                or any(v in returned or any(n.index in live or _is_fused(n) for n in v.users) for v in node.outputs)
                or not any(v.users for v in node.outputs)
            )
        ):
            live.add(node.index)
    return [node for node in graph.nodes if node.index in live]
