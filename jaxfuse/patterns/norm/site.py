"""A recognised norm as a Match: with the residual add before it, the activation after it, the sum where it is read, and its
gradient where the program has it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import ADD, CAST, size, varying_axes
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.batch_axes import reshaped
from jaxfuse.ops.norm import OP, normalised
from jaxfuse.patterns.activations import name_activation
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.norm import gradient as norm_grad
from jaxfuse.patterns.norm.form import read_form
from jaxfuse.patterns.walk import Walk, longest
from jaxfuse.program.graph import Emission, Node, Value
from jaxfuse.program.liveness import FusedReader
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.runtime.reasons import no_kernel


def fused(graph, part, node: Node, norm, name: str, claimed: set[int], unprofitable):
    """The norm as a Match with as much before and after it as the kernel takes, and its gradient as another; a Refusal for
    what it does not."""
    x, before = norm.x, add_before(part, norm.x, claimed)
    chains, _ = Walk(part, norm.end.ndim - 1, claimed, name_activation).chains(norm.end)
    form = functools.cache(lambda: read_form(norm.moments, norm.same, norm.nodes, norm.end))
    dtype = x.dtype if any(chain.end.dtype == x.dtype for chain in chains) else norm.end.dtype

    def attempt(chain):
        site = _Site(graph, part, node, norm, form(), chain, before if x.dtype == dtype else None, name)
        if chain.affine or chain.residual is not None:
            raise Unfit(no_kernel("it adds to or scales the normalised value"))
        return site.matches(unprofitable)

    found, chain, refused = longest(chains, dtype, attempt)
    label = f"{'add+' * (before is not None)}{name}"
    nodes = (*[before] * (before is not None), *norm.nodes)
    yield from found or ()
    if refused and (not found or _steps(refused[0])):
        claims = () if found else (*nodes, *refused[0].nodes)
        row = UnfusedStep if found else Refusal
        yield row(label + _steps(refused[0]), node, (x,), refused[1].reason, nodes=claims)


class _Site:
    """A norm with a chain after it and the add `before` it."""

    def __init__(self, graph, part, node: Node, norm, form, chain, before: Node | None, name: str):
        self.graph, self.part, self.node, self.norm, self.form, self.chain, self.before = graph, part, node, norm, form, chain, before
        self.x, self.end = part.original(norm.x), part.original(chain.end)
        self.dtype = jnp.promote_types(self.x.dtype, self.end.dtype)  # of the kernel: x is not rounded before its statistics are taken
        self.label = f"{'add+' * (before is not None)}{name}{_steps(chain)}"
        self.parameters = [part.original(v) for v in form.used()]

    def matches(self, unprofitable) -> list[Match]:
        """The match, and that of the gradient if the program computes it. Raises `Unfit` where no kernel takes them."""
        form, x, end, before = self.form, self.x, self.end, self.before
        full = (x,) if before is None else tuple(map(self.part.original, before.inputs))
        config = form.config(rank=x.ndim, has_residual=before is not None, activation=self.chain.activation or NO_ACTIVATION)
        gradient = norm_grad.find(self.graph, self.part, form, self.chain, x, config) if self.part is not self.graph else None
        self._require_no_reader(norm_grad.served(self.graph, gradient))
        config = dataclasses.replace(config, wants_sum=before is not None and (gradient is not None or self._reads_sum()))
        batch = x.shape[: form.first] or (1,)
        type_of_x = jax.ShapeDtypeStruct((*batch, *x.shape[form.first :]), self.dtype)
        vector = jax.ShapeDtypeStruct(config.parameter_shape, jnp.float32)
        types = (*[type_of_x] * len(full), vector, vector)
        require(OP.forward, config, types, unprofitable, "norm", config, types)
        backward = [norm_grad.fused(self.graph, self.label, self.node, gradient, form, self.chain, x, self.norm.end.shape, config,
                                    self.parameters, self.dtype)] if gradient else []
        saved = gradient.saved if gradient else ()
        emission = self._emission(full, dataclasses.replace(config, saving=bool(saved)), saved)
        nodes = (*[before] * (before is not None), *self.norm.nodes, *self.chain.nodes)
        passes = 2 + len(full) + len([n for n in self.chain.nodes if n.primitive != CAST])
        found = Match(self.label, self.node, nodes, (emission,), full, np.dtype(end.dtype).itemsize * size(x) * passes)
        return [found, *backward]

    def _emission(self, full: tuple[Value, ...], config, saved) -> Emission:
        x, end, layout, like = self.x, self.end, self.chain.layout, self.norm.end.shape

        def run(read):
            arrays = [reshaped(read(v).astype(self.dtype), x.shape) for v in full]
            gamma, beta = self.form.arrays(lambda v: read(self.part.original(v)))
            outs = normalised(config, *arrays, gamma, beta)
            y, *others = outs if isinstance(outs, tuple) else (outs,)
            yield end, reshaped(layout.place(reshaped(y, like)), end.shape).astype(end.dtype)
            yield from zip((*[x] * config.wants_sum, *saved), others, strict=True)

        return Emission((*full, *self.parameters), (end, *[x] * config.wants_sum, *saved), run)

    def _require_no_reader(self, fused_away: set[int]):
        """Raises `Unfit` where something else reads an inner value; `fused_away` are nodes that are not needed any more."""
        nodes = (*self.norm.nodes, *self.chain.nodes)
        mine = {n.index for n in nodes} | fused_away
        for value in dict.fromkeys(v for n in nodes for v in map(self.part.original, n.outputs)):
            if value is self.end or _is_cast_of(value, self.x) or _is_before(value, self.x):
                continue
            if self.graph.is_returned(value):  # as a loop's body does with what its backward loop reads
                raise Unfit(no_kernel(f"{value!r} is returned by the program"))
            reader = next((n for n in value.users if n.index not in mine), None)
            if reader is not None:
                # a fused op says its direction itself
                backward = not isinstance(reader, FusedReader) and not self.part.node_in_subgraph(reader)
                raise Unfit(no_kernel(f"{value!r} is read by {reader} too{', in the backward pass' * backward}"))

    def _reads_sum(self) -> bool:
        mine = {n.index for n in (self.before, *self.norm.nodes, *self.chain.nodes)}
        return self.graph.is_returned(self.x) or any(n.index not in mine for n in self.x.users)


def _is_before(value: Value, x: Value) -> bool:
    """Whether it is computed first, as what x is a reshape of."""
    return x.producer is not None and value.node.index < x.producer.index


def _is_cast_of(value: Value, x: Value) -> bool:
    return value.node.primitive == CAST and value.node.inputs[0] is x


def _steps(chain) -> str:
    return "".join(f"+{step}" for step in chain.after_affine)


def add_before(part, x: Value, claimed: set[int]) -> Node | None:
    """A residual add that nothing else took, right before the norm."""
    node = x.producer
    if node is not None and node.primitive in ADD and node.index not in claimed and len(set(node.inputs)) == 2:
        if all(v.shape == x.shape and v.dtype == x.dtype and size(v) > 1 and len(varying_axes(v)) > 1 for v in node.inputs):
            return node
    return None
