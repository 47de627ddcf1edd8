"""What patterns require of what they have found: that a kernel takes it and the policy expects a gain of it, that nothing else reads
what is inside. And the gradients that an op gives, in the places where JAX's own gradient of the same nodes was found."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxfuse.analysis.gradients import Gradient
from jaxfuse.analysis.regions import depends_on
from jaxfuse.ops.batch_axes import reshaped
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead, dead_after
from jaxfuse.program.site import Unfit


def require(stage, config, types, unprofitable, op: str, *rule, cost=lambda kernel: ""):
    """The kernel for a stage of an op with this config and these types. `rule` is what the op's rules are asked: config and types
    of the forward op, and "backward" for its gradient; `cost(kernel)` what the pattern itself knows against it. Raises `Unfit` where
    there is no kernel, or where no gain is expected."""
    kernel, reason = stage.kernel(config, types)
    reason = reason or unprofitable(op, *rule, cost=cost(kernel))
    if reason:
        raise Unfit(reason)
    return kernel


def require_batch_sharding(values: Iterable[Value]) -> None:
    """Explicit axes of a mesh may divide these values along their first dimension only. Raises `Unfit`."""
    found = next((v for v in values if any(v.spec[1:])), None)
    if found is not None:
        raise Unfit(f"{found!r} is sharded along an explicit axis of the mesh, and not along its first dimension")


def require_unread(graph: Graph, nodes: Sequence[Node], ends: tuple[Value, ...]) -> None:
    """Raises `Unfit` where others read what is inside these nodes, of a part of the graph too, once the `ends` are computed otherwise."""
    fused_away = dead_after(graph, ends)
    if nodes[0].index not in fused_away:
        mine = {n.index for n in nodes} | dead(graph) | set(fused_away)
        readers = (user for n in nodes for v in graph.nodes[n.index].outputs if v not in ends for user in v.users)
        raise Unfit(f"what is inside is read by {next((n for n in readers if n.index not in mine), nodes[0])} too")


def gradient_emission(gradient: Gradient, needs: tuple[Value, ...], arrays: Callable[[Callable], Iterable]) -> Emission:
    """Of the values found: `arrays(read)` are the gradients that they hold, to which what else they sum is added. Raises `Unfit` where
    they wait for each other."""
    needs = (*needs, gradient.dy, *[v for added in gradient.added for v in added])
    require_batch_sharding(needs)
    if depends_on(needs, gradient.defines):
        raise Unfit("its gradients depend on each other")

    def run(read) -> Iterator[tuple[Value, object]]:
        for value, added, array in zip(gradient.found, gradient.added, arrays(read)):
            if value is not None:
                yield value, reshaped(sum(map(read, added), array).astype(value.dtype), value.shape)

    return Emission(needs, gradient.defines, run)
