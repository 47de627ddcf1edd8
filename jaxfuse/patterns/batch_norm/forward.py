"""Training batch norm, residual add and activation: a value with batch statistics, and what is done to it with them."""

from collections.abc import Iterator

from jaxfuse.analysis.axes import IndexMap
from jaxfuse.analysis.layout import Layout, is_reshape
from jaxfuse.analysis.normal import CAST, NotPerChannel, chosen, narrowest, per_channel, unwidened
from jaxfuse.analysis.statistics import Statistics
from jaxfuse.analysis.sums import reductions, shared_over, squared, unmasked
from jaxfuse.ops.stage import refused_array
from jaxfuse.patterns.batch_norm import gradient as batch_norm_grad
from jaxfuse.patterns.batch_norm.site import Site, Unscaled, uses
from jaxfuse.patterns.kernel import require_batch_sharding
from jaxfuse.patterns.walk import Chain, Walk, longest
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.runtime.reasons import Unprofitable, no_kernel


def anchors(graph: Graph) -> list[Node]:
    """Sums over some axes of values that are squared and summed over the same axes too; last first."""
    sums = {n: squared(n.inputs[0]) for n in graph.nodes if n.primitive == "reduce_sum" and n.inputs[0].literal is None}
    summed = {(of[0], n.params["axes"]) for n, of in sums.items() if of}
    found = {x: n for n in reversed(sums) if n.inputs[0].ndim >= 2
             for x in (narrowest(n.inputs[0]), unmasked(n.inputs[0])) if (x, n.params["axes"]) in summed}
    return list(found.values())


def match(graph: Graph, node: Node, claimed: set[int], unprofitable) -> Iterator[Match | Refusal]:
    x, left = unwidened(chosen(unwidened(node.inputs[0]))), _left(node)
    is_batch_norm = len(left) == 1 and left != (0,)  # else of rows of the batch, or of groups: patterns/norm has them
    if unmasked(x) is not x and not Statistics(x, left):  # x itself is normalised behind a dropout
        reason = no_kernel(f"{x.producer} leaves elements out of the statistics")
        yield Refusal("bn" if is_batch_norm else "norm", node, (x,), reason)
        return
    if not is_batch_norm:
        return
    (axis,), wide = left, node.inputs[0]
    rows = [*_rows_of(graph, node, x, axis, claimed, unprofitable)]
    if wide.dtype != x.dtype and not any(isinstance(row, Match) or isinstance(row.reason, Unprofitable) for row in rows):
        # where the result stays wide, so may what it reads
        of_wide = [*_rows_of(graph, node, wide, axis, claimed, unprofitable)]
        rows = of_wide if any(isinstance(row, Match) for row in of_wide) else rows
    yield from rows


def _rows_of(graph: Graph, node: Node, x: Value, axis: int, claimed: set[int], unprofitable) -> Iterator[Match | Refusal]:
    """Where it is x that is normalised, or what it is another shape of."""
    x, axis = _unflattened(graph, x, axis)
    try:
        require_batch_sharding((x,))
        yield from _rows(graph, node, _statistics(node, x, axis), claimed, unprofitable)
    except Unfit as unfit:
        yield Refusal("bn", node, (x,), unfit.reason)


def _left(node: Node) -> tuple[int, ...]:
    """The axes of its operand that are left of the sum `node` and of what is summed further."""
    tensor = node.inputs[0]
    left = [r.left(tensor.shape) for r in reductions(tensor, IndexMap.of(tensor.shape)) if r.first is node]
    return min(filter(None, left), key=len, default=())


def _unflattened(graph: Graph, x: Value, axis: int) -> tuple[Value, int]:
    """What is normalised: where x is that in another shape, which only its statistics are taken of, and its channel axis."""
    node = x.producer
    layout = Layout.of(node.inputs[0].shape).then(node) if node is not None and is_reshape(node) else None
    if node is None or layout is None:
        return x, axis
    source = unwidened(node.inputs[0])
    own = next((d for d in range(source.ndim) if layout.axes(d) == (axis,)), None)
    if own is None:
        return x, axis
    statistics = Statistics(source, (own,))
    return (source, own) if statistics and _first_step(graph, statistics, _served(graph, statistics)) else (x, axis)


def _statistics(node: Node, x: Value, axis: int) -> Statistics:
    """Raises `Unfit` where the program has not both of them."""
    statistics = Statistics(x, (axis,))
    if not statistics:
        name = shared_over(node.inputs[0])
        shared = no_kernel(f"its statistics are shared over the mesh axis {name!r}")
        raise Unfit(shared if name else refused_array(x) or "its sums are not made into a mean and a variance")
    return statistics


def _rows(graph: Graph, node: Node, statistics: Statistics, claimed, unprofitable) -> Iterator[Match | Refusal]:
    """The match, and that of the gradient; what was not taken and why. Raises `Unfit` where nothing normalises x."""
    x = statistics.x
    plain, chain = batch_norm_grad.find(graph, statistics), None
    for gradient in (*(batch_norm_grad.through_activation(graph, plain) if plain else ()), plain):
        ignored = gradient.nodes if gradient else _served(graph, statistics)
        step = _first_step(graph, statistics, ignored)
        if step is None:  # with a relu that ends what `jax.checkpoint` computes again, of which only the mask is left
            continue

        def attempt(chain: Chain, gradient=gradient) -> tuple[Site, Match]:
            site = Site(graph, node, statistics, gradient, chain, unprofitable)
            return site, site.forward()

        chains, stop = Walk(graph, statistics.axis, claimed, ignored).chains(*step)
        found, chain, refused = longest(chains, x.dtype, attempt)
        if found and found[0].includes_activation:
            break
    if chain is None and plain and plain.results:  # with a norm that ends it: only the statistics are computed again
        yield Site(graph, node, statistics, plain, Chain(x, Layout.of(x.shape)), unprofitable).backward(plain)
        return
    if chain is None:
        raise Unfit("nothing normalises it: no step on it uses its statistics")
    if found:
        site, match = found
        yield match
        if gradient:
            yield site.backward(gradient)
    label = chain.label_of_norm("bn")
    if refused and not (found and refused[0].label_of_norm("bn") == label):
        reason = stop.reason if isinstance(refused[1], Unscaled) else refused[1].reason
        yield (UnfusedStep if found else Refusal)(refused[0].label_of_norm("bn"), node, (x,), reason)
    elif stop.unfused:
        yield UnfusedStep(f"{label}+{stop.unfused}", node, (x,), stop.reason)


def _served(graph: Graph, statistics: Statistics) -> frozenset[int]:
    """The nodes that nobody needs once the statistics are computed otherwise."""
    return batch_norm_grad.only_for(graph, (*statistics.moments,), live=statistics.x)


def _first_step(graph: Graph, statistics: Statistics, ignored: frozenset[int]) -> tuple[Value, Node] | None:
    """Where x, or x cast to float32, first meets a number per channel that comes from its own statistics."""
    for value in (statistics.x, *[n.out for n in statistics.x.users if n.primitive == CAST]):
        for node in value.users:
            if node.primitive in ("sub", "mul", "div") and len(node.inputs) == 2 and node.index not in ignored:
                small = per_channel(node.other_input(value), value, statistics.axis)
                if not isinstance(small, NotPerChannel) and uses(statistics, small):
                    if any(n.index not in ignored for n in node.out.users) or graph.is_returned(node.out):
                        return value, node
    return None
