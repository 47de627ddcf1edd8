"""Walks from an anchor (a convolution, a value with batch statistics) through what is done to it, as far as one kernel can
go: per-channel affine steps, a residual add, an activation. What was followed is a `Chain`. Knows no op.

A walk ends at the first check that fails. The reason is kept; `unfused` names the step that the check prevented, so that
a report can say what was almost fused.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.layout import Layout
from jaxfuse.analysis.normal import ADD, NotPerChannel, constant, is_float_cast, is_rounded, per_channel, repeats, unwidened
from jaxfuse.analysis.regions import Region, regions
from jaxfuse.ops.activations import Activation
from jaxfuse.patterns.activations import WalkEnd, name_activation
from jaxfuse.program.elementwise import is_elementwise
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.liveness import FusedReader
from jaxfuse.program.site import Unfit
from jaxfuse.runtime.reasons import no_kernel


@dataclasses.dataclass(frozen=True)
class Chain:
    """act((value₀ - center)·scale + offset + residual), or act(…) + residual, as a list of steps from the anchor's value to
    `end`. Each `layout` is how a value lies compared with the anchor's: the end, what the residual was added to, the activation's
    argument."""

    end: Value
    layout: Layout
    nodes: tuple[Node, ...] = ()
    affine: tuple[tuple[str, Value], ...] = ()  # ("add" | "sub" | "mul" | "div", one number for each channel)
    residual: Value | None = None
    residual_layout: Layout | None = None
    residual_last: bool = False  # added to the activation's value
    subtracts: bool = False  # the residual
    activation: Activation | None = None
    region: Region | None = None  # the nodes that compute the activation
    region_layout: Layout | None = None

    def then(self, node: Node, **changes) -> Self:
        """With one more node at its end."""
        return dataclasses.replace(self, end=node.out, nodes=(*self.nodes, node), **changes)

    @property
    def masks(self) -> tuple[Value, ...]:
        """Comparisons of the activation's argument, which autodiff keeps."""
        return self.region.masks if self.region else ()

    def masks_from(self, y) -> Iterator[tuple[Value, object]]:
        """The masks, computed from the activation's value `y`."""
        if self.region and self.masks:
            yield from zip(self.masks, self.region.replay(y, self.masks))

    @property
    def affine_steps(self) -> tuple[str, ...]:
        """"bias" and "scale", in the order in which they come first."""
        return tuple(dict.fromkeys(step_name(kind) for kind, _ in self.affine))

    @property
    def steps(self) -> tuple[str, ...]:
        """Like ("bias", "add", "relu"). Factors with a mean before them, or a shift after them, are a normalisation, "bn". A number,
        or factors after a bias as in ConvNeXt, are a scale."""
        steps = self.affine_steps
        factors = any(kind in ("mul", "div") and constant(value) is None for kind, value in self.affine)
        centered = any(kind == "sub" for kind, _ in self.affine) or bool(self.affine) and self.affine[-1][0] == "add"
        return (*(["bn"] if factors and centered and len(steps) == 2 else steps), *self.after_affine)

    def label(self, anchor: str) -> str:
        """Like "conv+bias+add+relu"."""
        return "+".join([anchor, *self.steps])

    def label_of_norm(self, norm: str) -> str:
        """The same where the steps per channel are the norm's own."""
        return "+".join([norm, *self.after_affine])

    @property
    def after_affine(self) -> tuple[str, ...]:
        """The steps after those per channel, in their order: "add", and the activation's name."""
        added = ("add",) if self.residual is not None else ()
        activated = (self.activation.name,) if self.activation else ()
        return activated + added if self.residual_last else added + activated

    def coefficients(self, vector: Callable[[Value], Any]):
        """(center, scale, offset), None where there is none; `vector` gives a step's operand as `[channels]`."""
        center = scale = offset = None
        for kind, value in self.affine:
            operand = vector(value)
            if kind == "sub" and center is scale is offset is None:
                center = operand
            elif kind in ("add", "sub"):
                signed = operand if kind == "add" else -operand
                offset = signed if offset is None else offset + signed
            else:
                factor = operand if kind == "mul" else 1 / operand
                scale = factor if scale is None else scale * factor
                offset = offset if offset is None else offset * factor
        return center, scale, offset

    def signed(self, residual):
        """The array that is added."""
        return -residual if self.subtracts else residual

    @property
    def has_scale(self) -> bool:
        return any(kind in ("mul", "div") for kind, _ in self.affine)


def step_name(kind: str) -> str:
    """Of a step per channel, by its primitive."""
    return "bias" if kind in (*ADD, "sub") else "scale"


class Walk:
    """How to walk: over which graph, along which channel axes of the first value, and what not to touch.

    `claimed` are indices of nodes that belong to other matches; `ignored` those of nodes that may read inner values because
    the match serves them (batch statistics). `name_activation(region)` names an elementwise region, or says why not.
    `adds_last`: a residual may come after the activation.
    """

    def __init__(self, graph, axes: int | tuple[int, ...], claimed: set[int], ignored: frozenset[int] = frozenset(),
                 adds_last: bool = False, name_activation=name_activation):
        self.graph, self.claimed, self.name_activation = graph, claimed, name_activation
        self.axes = (axes,) if isinstance(axes, int) else axes
        self.ignored, self.adds_last = ignored, adds_last

    def chains(self, start: Value, first: Node | None = None) -> tuple[list[Chain], WalkEnd]:
        """Every chain from `start` (shortest first, the empty one included unless `first`, the step to begin with, is
        given) and why the last could not be extended."""
        self.sources = start, *(start.producer.inputs if start.producer else ())
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
            if is_rounded(value, self.sources):
                return WalkEnd(no_kernel(f"{node} casts what was rounded to {value.dtype}"))
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
            return WalkEnd(f"{node} adds to a value from which {chain.masks[0].producer} is computed", "add")
        return self._added(chain, node, full_size[full_size[0] is chain.end])

    def _added(self, chain: Chain, node: Node, other: Value) -> Chain | WalkEnd:
        if chain.residual is not None:
            return WalkEnd(f"{node} adds a second full-size value", "add")
        return chain.then(node, residual=unwidened(other), residual_layout=chain.layout, residual_last=chain.activation is not None,
                          subtracts=node.primitive == "sub" and node.inputs[1] is other)

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
        other = node.other_input(chain.end)
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
        if kind == "mul" and full_size:  # a gate, a mask: not a missed scale
            return WalkEnd(f"{node} multiplies by another full-size value")
        if kind not in ("add", "sub") or not full_size:
            return WalkEnd(small.reason, step_name(kind))
        return self._added(chain, node, other)

    def _unfused_step(self, chain: Chain, users: list[Node]) -> str | None:
        """What the walk would have taken next, had the value no other reader."""
        if chain.activation is not None:
            return None
        users = [node for node in users if len(node.outputs) == 1]
        for node in users:
            alone = Region(chain.end, node.out, (node,))
            is_float = jnp.issubdtype(node.out.dtype, jnp.floating)  # a comparison is no activation, and has no derivative
            if is_float and is_elementwise(node) and all(v is chain.end or constant(v) is not None for v in node.inputs):
                named = self.name_activation(alone)
                if not isinstance(named, WalkEnd):
                    return named.name
        for node in users:
            taken = self._affine(chain, node) if len(node.inputs) == 2 else None
            if isinstance(taken, Chain) and (taken.residual is not chain.residual or len(users) == 1):
                return "add" if taken.residual is not None else step_name(taken.affine[-1][0])
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
