"""Walks from an anchor (a convolution, a value with batch statistics) through what is done to it, as far as one kernel can
go: per-channel affine steps, a residual add, an activation. Knows no op.

A walk ends at the first check that fails. The reason is kept; `unfused` names the step that the check prevented, so that
a report can say what was almost fused.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.elementwise import is_elementwise
from jaxfuse.analysis.layout import Layout
from jaxfuse.analysis.normal import ADD, NotPerChannel, constant, is_float_cast, per_channel, repeats, unwidened
from jaxfuse.analysis.regions import Region, regions
from jaxfuse.patterns.chain import Chain
from jaxfuse.program.graph import Graph, Node, Transposed, Value
from jaxfuse.program.liveness import FusedReader, dead, dead_after
from jaxfuse.program.site import Unfit
from jaxfuse.runtime.reasons import no_kernel


class WalkEnd(NamedTuple):
    """Why a walk went no further; `unfused` is the step that was not taken, None where nothing was there to take."""

    reason: str
    unfused: str | None = None


class Walk:
    """How to walk: over which graph, along which channel axes of the first value, and what not to touch.

    `claimed` are indices of nodes that belong to other matches; `ignored` those of nodes that may read inner values because
    the match serves them (batch statistics). `name_activation(region)` names an elementwise region, or says why not.
    `adds_last`: a residual may come after the activation.
    """

    def __init__(self, graph, axes: int | tuple[int, ...], claimed: set[int], name_activation, ignored: frozenset[int] = frozenset(),
                 adds_last: bool = False):
        self.graph, self.claimed, self.name_activation = graph, claimed, name_activation
        self.axes = (axes,) if isinstance(axes, int) else axes
        self.ignored, self.adds_last = ignored, adds_last

    def chains(self, start: Value, first: Node | None = None) -> tuple[list[Chain], WalkEnd]:
        """Every chain from `start` (shortest first, the empty one included unless `first`, the step to begin with, is
        given) and why the last could not be extended."""
        chain = Chain(start, Layout.of(start.shape))
        found = [chain] if first is None else []
        while True:
            step = self._step(chain) if first is None else self._affine(chain, first)
            first = None
            if isinstance(step, WalkEnd):
                return found or [chain], step
            steps = step if isinstance(step, list) else [step]
            # a mere reshape gains nothing: at a chain's end it is left where it is
            found += [s for s in steps if s.layout == chain.layout or s.layout.axis_order != chain.layout.axis_order]
            chain = steps[-1]

    def _step(self, chain: Chain) -> Chain | list[Chain] | WalkEnd:
        """The next step; several where it is an activation of which a part is one too (relu6 and its relu)."""
        value = chain.end
        users = [n for n in value.users if n.index not in self.ignored]
        if not users:
            return WalkEnd("nothing reads it")
        elsewhere = read_elsewhere(self.graph, value, users)
        if chain.activation is None and not self.graph.is_returned(value):
            activated = self._activations(chain)
            if isinstance(activated, list) or activated and activated.unfused:
                return activated
        if elsewhere:
            return WalkEnd(elsewhere, self._unfused_step(chain, users))
        (node,) = users
        if isinstance(node, FusedReader) or node.index in self.claimed:
            return WalkEnd(f"{node} belongs to another fused site")
        if is_float_cast(node) and not chain.masks:
            return chain.then(node)
        layout = None if chain.masks else chain.layout.then(node)
        if layout:
            if layout.axes(*self.axes) is None:
                return WalkEnd(f"{node} merges the channel axis with another")
            return chain.then(node, layout=layout)
        if chain.activation is not None:
            return self._after_activation(chain, node)
        return self._affine(chain, node)

    def _after_activation(self, chain: Chain, node: Node) -> Chain | WalkEnd:
        full_size = [v for v in node.inputs if v.shape == chain.end.shape and not repeats(v)]
        if node.primitive not in ADD or len(set(full_size)) != 2:
            return WalkEnd("the activation ends it")
        if not self.adds_last:
            return WalkEnd(no_kernel(f"{node} adds after the activation"), "add")
        if chain.masks:  # the sum would not tell them
            return WalkEnd(f"{node} adds to a value that {chain.masks[0].producer} is told by", "add")
        return self._added(chain, node, full_size[full_size[0] is chain.end])

    def _added(self, chain: Chain, node: Node, other: Value) -> Chain | WalkEnd:
        if chain.residual is not None:
            return WalkEnd(f"{node} adds a second full-size value", "add")
        return chain.then(node, residual=unwidened(other), residual_layout=chain.layout, residual_last=chain.activation is not None)

    def _activations(self, chain: Chain) -> list[Chain] | WalkEnd | None:
        """The elementwise regions from here that have a name, shortest first; else why the longest has none."""
        named: list[Chain] = []
        stop = None
        for region in regions(chain.end, self.graph.is_returned, self.ignored):
            if any(n.index in self.claimed for n in region.nodes):
                continue
            name = self.name_activation(region)
            if not isinstance(name, WalkEnd):
                named.append(dataclasses.replace(chain, end=region.end, nodes=(*chain.nodes, *region.nodes), activation=name,
                                                 region=region, region_layout=chain.layout))
            else:
                stop = name
        return named or stop

    def _affine(self, chain: Chain, node: Node) -> Chain | WalkEnd:
        """One addition, subtraction, multiplication or division: by a number per channel, or of a residual."""
        kind = "add" if node.primitive in ADD else node.primitive
        if kind not in ("add", "sub", "mul", "div"):
            return WalkEnd(f"{node} is not a step that a kernel can take")
        left, right = node.inputs
        if left is right:
            return WalkEnd(f"{node} combines the value with itself")
        other = right if left is chain.end else left
        if other is left and kind == "div":
            return WalkEnd(f"{node} has the value on its right side")
        if other is left and kind == "sub":  # other + (-1)·value
            if chain.residual is not None:
                return WalkEnd(f"{node} scales the sum with the residual", "scale")
            minus_one = Value(node.out.aval.update(shape=()), literal=np.asarray(-1, node.out.dtype))
            kind, chain = "add", dataclasses.replace(chain, affine=(*chain.affine, ("mul", minus_one)))
        channel_axes = chain.layout.axes(*self.axes)
        assert channel_axes is not None, "no step that merges the channel axis with another is taken"
        small = per_channel(other, chain.end, channel_axes)
        if not isinstance(small, NotPerChannel):
            if chain.residual is not None and kind in ("mul", "div"):
                return WalkEnd(f"{node} scales the sum with the residual", "scale")
            return chain.then(node, affine=(*chain.affine, (kind, small)))
        full_size = other.shape == chain.end.shape and not repeats(other)
        if kind == "sub" and full_size:
            return WalkEnd(f"{node} subtracts a full-size value: it would be one more pass to change its sign", "sub")
        if kind == "mul" and full_size:  # a gate, a mask: not a missed scale
            return WalkEnd(f"{node} multiplies by another full-size value")
        if kind != "add" or not full_size:
            return WalkEnd(small.reason, dict(add="bias", sub="bias").get(kind, "scale"))
        return self._added(chain, node, other)

    def _unfused_step(self, chain: Chain, users: list[Node]) -> str | None:
        """What the walk would have taken next, had the value no other reader."""
        if chain.activation is not None:
            return None
        users = [node for node in users if len(node.outputs) == 1]
        for node in users:
            alone = Region(chain.end, node.out, (node,))
            if is_elementwise(node) and all(v is chain.end or constant(v) is not None for v in node.inputs):
                named = self.name_activation(alone)
                if not isinstance(named, WalkEnd):
                    return named.name
        for node in users:
            taken = self._affine(chain, node) if len(node.inputs) == 2 else None
            if isinstance(taken, Chain) and (taken.residual is not chain.residual or len(users) == 1):
                return "add" if taken.residual is not None else dict(add="bias", sub="bias").get(taken.affine[-1][0], "scale")
        return None


def read_elsewhere(graph, value: Value, users: list[Node]) -> str:
    """Why no step can take the value in, of which these are the readers: it is returned, or read more than once."""
    if graph.is_returned(value):
        return f"{value!r} is returned by the program"
    return f"{value!r} is read {len(users)} times: by {' and '.join(map(str, users[:3]))}" if len(users) > 1 else ""


Found = TypeVar("Found")


def longest(chains: list[Chain], dtype, attempt: Callable[[Chain], Found],
            also=lambda chain: False) -> tuple[Found | None, Chain, tuple[Chain, Unfit] | None]:
    """(what `attempt` makes of it, the chain, what was refused before it): the longest chain for which it does not raise `Unfit`.
    What was refused is the longest chain for which it did. A kernel takes and gives one dtype: chains that end in another are
    passed over, but for those that `also` takes."""
    refused = None
    for chain in reversed(chains):
        if chain.end.dtype == dtype or also(chain):
            try:
                return attempt(chain), chain, refused
            except Unfit as unfit:
                refused = refused or (chain, unfit)
    chain = chains[-1]
    return None, chain, refused or (chain, Unfit(f"the result is {chain.end.dtype}: the kernel takes and gives {dtype}"))


def as_vector(array, shape: tuple[int, ...]):
    """A per-channel operand in the shape of the channels, at least float32."""
    array = jnp.asarray(array)
    array = array.astype(jnp.promote_types(array.dtype, jnp.float32)).reshape(-1)
    return jnp.broadcast_to(array, (math.prod(shape),)).reshape(shape)


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


def depends_on(values: Iterable[Value], targets: Collection[Value], behind: Collection[Value] = ()) -> bool:
    """Whether any of the values is a target or computed from one; what lies behind the values `behind` is not looked at."""
    first = min((v.producer.index if v.producer else -1 for v in targets if not isinstance(v, Transposed)), default=0)
    pending, seen = list(values), set[Value]()
    while pending and targets:
        value = pending.pop()
        if value in targets:
            return True
        node = value.producer
        if node is None or value in behind or value in seen:
            continue
        seen.update(node.outputs)
        if node.index >= first or isinstance(value, Transposed):
            pending += node.inputs
    return False
