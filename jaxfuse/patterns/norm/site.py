"""A recognised norm as a Match: with the residual add before it, the activation after it, the sum where it is read. And its gradient,
where the program has it: of x, gamma and beta, found as JAX's own gradient of the norm's nodes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.gradients import Gradient, gradients
from jaxfuse.analysis.normal import CAST, chosen, is_float_cast, size
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.batch_axes import reshaped
from jaxfuse.ops.norm import OP, normalised
from jaxfuse.ops.op import Linear
from jaxfuse.ops.stage import type_of
from jaxfuse.patterns.activation_grad import activation_grads_at
from jaxfuse.patterns.kernel import gradient_emission, require
from jaxfuse.patterns.norm.form import NormForm
from jaxfuse.patterns.walk import Chain
from jaxfuse.program.autodiff import backward
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
        gradient = self._gradient() if self.part is not self.graph else None
        full = (self.x,) if self.before is None else tuple(map(self.part.original, self.before.inputs))
        statistic = jax.ShapeDtypeStruct((*self.batch, self.config.inner[1]), jnp.float32)
        saved = (Value(statistic), Value(statistic)) if gradient else ()  # mean and rstd
        self._require_no_reader(gradient.defines if gradient else ())
        wants_sum = self.before is not None and (gradient is not None or self._reads_sum())
        config = dataclasses.replace(self.config, wants_sum=wants_sum)
        types = (*self.types[:1] * len(full), *self.types[1:])
        require(OP.forward, config, types, unprofitable, "norm", config, types)
        backward = [self._backward(gradient, saved)] if gradient else []
        emission = self._emission(full, dataclasses.replace(config, with_residuals=bool(saved)), saved)
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

    # --- the gradient

    def _gradient(self) -> Gradient | None:
        """That of the norm and the activation after it, if the program computes it: of the value x, or what x is a cast or another
        shape of, and of the parameters. Its `dy` is the cotangent of what the chain ends in."""
        chain = self.chain
        end = self.part.original(chain.region.start if chain.region else chain.end)
        # several layers may cast it, each with a gradient of its own, and a product with 1 hides what is multiplied first
        ends = dict.fromkeys((end, end.node.inputs[0] if is_float_cast(end.node) else chosen(end)))
        ways = (gradients(self.graph, [x, *self.parameters], v, backward(self.graph)) for v in ends for x in self.given)
        for gradient in itertools.chain.from_iterable(ways):
            dy: Value | None = gradient.dy
            if (activation := chain.activation) and (region := chain.region):
                slopes = activation_grads_at(self.graph, end, gradient.dy)
                dy = next((slope.dy for slope in slopes if slope.dy.shape == end.shape and slope.is_of(activation, region)), None)
            if dy is not None and gradient.defines:
                return gradient._replace(dy=dy)
        return None

    def _backward(self, gradient: Gradient, saved: tuple[Value, ...]) -> Match:
        """`saved` are mean and rstd, which the forward pass keeps. Raises `Unfit` where no kernel takes it."""
        others, *added = gradient.added  # other gradients of x, which the kernel adds, and of the parameters
        config = dataclasses.replace(self.config, has_residual=False, wants_sum=bool(others), with_residuals=True)
        wanted = any(v is not None for v in gradient.found[1:])
        linear = Linear(config, (True, wanted, wanted), self.types, 5)
        _, reason = OP.backward.kernel(linear, (*self.types, *[v.aval for v in saved], *self.types[:1] * (1 + config.wants_sum)))

        def placed(array):
            return reshaped(array.astype(self.dtype), self.shape)

        def vectors(*arrays):
            return self.form.arrays(dict(zip(self.form.used(), arrays)).__getitem__)

        def arrays(read):
            layout = self.chain.region_layout or self.chain.layout  # of the activation's value
            dy = layout.undo(read(gradient.dy), tuple(range(len(self.inner))))
            (gamma, beta), back = jax.vjp(vectors, *map(read, self.parameters))
            ds = [placed(sum(map(read, others[1:]), read(others[0])))] if others else []
            primals = placed(read(self.x)), gamma, beta
            here = dataclasses.replace(linear, types=tuple(type_of(jax.typeof(a)) for a in primals))  # as they are sharded
            dx, *dvectors = OP.backward(here, *primals, *map(read, saved), placed(dy), *ds)
            return dx, *(back(tuple(dvectors)) if wanted else ())

        needs = (self.x, *saved, *self.parameters, *others)
        emission = gradient_emission(gradient._replace(added=[(), *added]), needs, arrays)
        if reason:
            raise Unfit(reason)
        bytes_saved = np.dtype(self.dtype).itemsize * size(self.x) * 4
        return Match(self.label, self.node, (), (emission,), (gradient.dy, self.x), bytes_saved, "backward")
