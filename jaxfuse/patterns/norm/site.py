"""A recognised norm as a Match: with the residual add before it, the activation after it, the sum where it is read, and its
gradient where the program has it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.normal import CAST, size
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.batch_axes import reshaped
from jaxfuse.ops.norm import OP, normalised
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.norm import gradient as norm_grad
from jaxfuse.patterns.norm.form import NormForm
from jaxfuse.patterns.walk import Chain
from jaxfuse.program.graph import Emission, Node, Value
from jaxfuse.program.liveness import FusedReader, dead_after
from jaxfuse.program.site import Match, Unfit
from jaxfuse.runtime.reasons import no_kernel


class Site:
    """A norm with a chain after it and the add `before` it, in the values of the whole program."""

    def __init__(self, graph, part, node: Node, norm, form: NormForm, chain: Chain, before: Node | None, name: str):
        self.graph, self.part, self.node, self.form, self.chain, self.before = graph, part, node, form, chain, before
        self.nodes = (*([before] if before else []), *norm.nodes, *chain.nodes)
        self.x, self.end, self.inner = part.original(norm.x), part.original(chain.end), norm.end.shape
        self.label = chain.label_of_norm(f"add+{name}" if before else name)
        self.given = [part.original(v) for v in norm.given]
        self.parameters = [part.original(v) for v in form.used()]
        self.dtype = jnp.promote_types(self.x.dtype, self.end.dtype)  # of the kernel: x is not rounded before its statistics are taken
        self.batch = self.x.shape[: form.first] or (1,)
        self.shape = (*self.batch, *self.x.shape[form.first :])
        self.config = form.config(rank=self.x.ndim, has_residual=before is not None, activation=chain.activation or NO_ACTIVATION)
        vector = jax.ShapeDtypeStruct(self.config.parameter_shape, jnp.float32)
        self.types = jax.ShapeDtypeStruct(self.shape, self.dtype), vector, vector

    def matches(self, unprofitable) -> list[Match]:
        """The match, and that of the gradient if the program computes it. Raises `Unfit` where no kernel takes them."""
        gradient = norm_grad.find(self) if self.part is not self.graph else None
        full = (self.x,) if self.before is None else tuple(map(self.part.original, self.before.inputs))
        statistic = jax.ShapeDtypeStruct((*self.batch, self.config.inner[1]), jnp.float32)
        saved = (Value(statistic), Value(statistic)) if gradient else ()  # mean and rstd
        self._require_no_reader(gradient.defines if gradient else ())
        wants_sum = self.before is not None and (gradient is not None or self._reads_sum())
        config = dataclasses.replace(self.config, wants_sum=wants_sum)
        types = (*self.types[:1] * len(full), *self.types[1:])
        require(OP.forward, config, types, unprofitable, "norm", config, types)
        backward = [norm_grad.fused(self, gradient, saved)] if gradient else []
        emission = self._emission(full, dataclasses.replace(config, saving=bool(saved)), saved)
        passes = 2 + len(full) + len([n for n in self.chain.nodes if n.primitive != CAST])
        bytes_saved = np.dtype(self.end.dtype).itemsize * size(self.x) * passes
        return [Match(self.label, self.node, self.nodes, (emission,), full, bytes_saved), *backward]

    def _emission(self, full: tuple[Value, ...], config, saved) -> Emission:
        others = (self.x, *saved) if config.wants_sum else saved

        def run(read):
            arrays = [reshaped(read(v).astype(self.dtype), self.x.shape) for v in full]
            outs = normalised(config, *arrays, *self.form.arrays(lambda v: read(self.part.original(v))))
            y, *made = outs if isinstance(outs, tuple) else (outs,)
            yield self.end, reshaped(self.chain.layout.place(reshaped(y, self.inner)), self.end.shape).astype(self.end.dtype)
            yield from zip(others, made, strict=True)

        return Emission((*full, *self.parameters), (self.end, *others), run)

    def _require_no_reader(self, gradients: tuple[Value, ...]):
        """Raises `Unfit` where something else reads an inner value once the end and the gradients are computed otherwise."""
        mine = {n.index for n in self.nodes} | set(dead_after(self.graph, gradients))
        for value in dict.fromkeys(v for n in self.nodes if n is not self.before for v in map(self.part.original, n.outputs)):
            if value is self.end or value.node.primitive == CAST and value.node.inputs[0] is self.x:
                continue
            if self.graph.is_returned(value):  # as a loop's body does with what its backward loop reads
                raise Unfit(no_kernel(f"{value!r} is returned by the program"))
            reader = next((n for n in value.users if n.index not in mine), None)
            if reader is not None:
                # a fused op says its direction itself
                backward = not isinstance(reader, FusedReader) and not self.part.node_in_subgraph(reader)
                raise Unfit(no_kernel(f"{value!r} is read by {reader} too{', in the backward pass' if backward else ''}"))

    def _reads_sum(self) -> bool:
        mine = {n.index for n in self.nodes}
        return self.graph.is_returned(self.x) or any(n.index not in mine for n in self.x.users)
