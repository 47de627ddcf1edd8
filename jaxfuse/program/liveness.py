"""Who reads a value, once what is already fused is gone: the graph's lists of users, kept true while matches are made."""

from collections.abc import Set as AbstractSet

from jaxfuse.program.graph import Emission, Graph, Node, Transposed, Value
from jaxfuse.program.site import Match


def reader_index(anchor: Node) -> int:
    """The index that the match at this node has among the readers of a value: that of no node."""
    return -1 - anchor.index


class FusedReader:
    """Stands among the users of a value for the match that needs it. No pattern looks through it."""

    primitive = "fused"
    params: dict = {}
    inputs = outputs = ()

    def __init__(self, match: Match):
        self.match, self.index = match, reader_index(match.anchor)

    def __str__(self):
        return f"the fused {self.match.pattern} ({self.match.direction}) at {self.match.anchor.source()}"


def accept(graph: Graph, match: Match) -> set[int]:
    """Makes the match a reader of what it needs; takes the nodes that nobody needs any more out of the lists of users.

    Returns the indices of those nodes."""
    reader = FusedReader(match)
    needs = [need for emission in match.emissions for need in emission.needs]
    needs += [value.of for value in needs if isinstance(value, Transposed)]
    for value in dict.fromkeys(needs):
        value.users.append(reader)  # type: ignore[arg-type]  # it has what readers are asked for
    _revive(graph, needs)
    defined = tuple(value for emission in match.emissions for value in emission.defines)
    graph.marks.replaced.update(defined)
    fused_away = dead_after(graph, defined)
    for node in fused_away.values():
        for value in dict.fromkeys(node.inputs):
            value.users.remove(node)
    graph.marks.fused_away.update(fused_away)
    return set(fused_away)


def dead(graph: Graph) -> frozenset[int]:
    """Indices of the nodes that neither the program nor a match needs."""
    return graph.initially_dead - graph.marks.revived


def _revive(graph: Graph, needs: list[Value]) -> None:
    """What the program itself did not need may be what a match reads: a relu's value, in a gradient without its loss."""
    pending, revived = list(needs), graph.marks.revived
    while pending:
        node = pending.pop().producer
        if node is not None and node.index in graph.initially_dead and node.index not in revived:
            revived.add(node.index)
            pending += node.inputs


def circular(graph: Graph, replacements: dict[Value, Emission]) -> list[Emission]:
    """Emissions of which each needs what the next defines, and the last what the first defines: each match is sound by
    itself, two that wait for each other are not. Neither is one that a side effect reads, and that needs what a later one gives."""
    path: dict[Value, None] = {}  # values whose needs are being looked at, in their order
    done: set[Value] = set()
    effects = [node for node in graph.nodes if node.eqn.effects and (node.inputs or node.outputs)]
    before = {node: [*earlier.inputs, *earlier.outputs] for earlier, node in zip(effects, effects[1:])}
    stack = [(value, False) for value in (*graph.outputs, *[v for node in effects for v in (*node.inputs, *node.outputs)])]
    while stack:
        value, looked_at = stack.pop()
        emission = replacements.get(value)
        if looked_at:
            path.pop(value)
            done |= {value, *(emission.defines if emission else ())}
        elif value in path:
            return [replacements[each] for each in path if each in replacements]
        elif value not in done:
            path[value] = None
            stack.append((value, True))
            node = value.producer
            needs = emission.needs if emission else (*node.inputs, *before.get(node, ())) if node else ()
            stack += [(need, False) for need in needs]
    return []


def dead_after(graph: Graph, defined: tuple[Value, ...], live: Value | None = None,
               ignored: AbstractSet[int] | None = None) -> dict[int, Node]:
    """The nodes, by index, that nobody needs once `defined` are computed otherwise; `live` stays. Readers with an
    index in `ignored` do not count, by default those that are dead already."""
    fused_away: dict[int, Node] = {}
    replaced, unneeded = graph.marks.replaced.union(defined), dead(graph) if ignored is None else ignored
    pending = [value.producer for value in defined if not isinstance(value, Transposed)]

    def needed(value: Value) -> bool:
        return value not in replaced and (
            value is live or graph.is_returned(value)
            or any(user.index not in fused_away and user.index not in unneeded for user in value.users))

    while pending:
        node = pending.pop()
        if node is None or node.index in fused_away or node.index in graph.marks.fused_away:
            continue
        if node.eqn.effects or any(map(needed, node.outputs)):
            continue
        fused_away[node.index] = node
        pending += [value.producer for value in node.inputs]
    return fused_away
