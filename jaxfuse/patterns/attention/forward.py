"""Attention: the products with the keys and the values and the softmax between them as one op, and its gradients, which are JAX's
own of these nodes."""

import dataclasses
import functools
import math
from itertools import compress
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.analysis.canonical import unwidened
from jaxfuse.analysis.gradients import between, gradients
from jaxfuse.ops.attention import OP
from jaxfuse.ops.attention_config import AttentionConfig, to_layout
from jaxfuse.ops.dense import refused_precision
from jaxfuse.ops.op import Linear, type_of
from jaxfuse.patterns.attention.axes import Operand
from jaxfuse.patterns.attention.form import Form, read_form
from jaxfuse.patterns.dense.site import batch_axes, config_of, is_product
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import depends_on, require_batch_sharding
from jaxfuse.program.autodiff import backward, forward
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match, Refusal, Unfit


def anchors(graph):
    return [n for n in forward(graph).nodes if is_product(n) and batch_axes(n)]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields the Match of an attention and of its gradients, or a Refusal; nothing if no softmax follows this product."""
    part = forward(graph)
    if node.index in claimed:
        return
    try:
        form = read_form(part, node, graph.dead)
        yield from _Site(graph, part, node, form).matches(unprofitable) if form else ()
    except Unfit as unfit:  # its products are rows of their own
        yield Refusal("attention", node, tuple(node.inputs), unfit.reason)


class _Site:
    """An attention as it will run. `inputs` are q, k, v and the biases as its nodes read them, `moving` the same before the first three
    were widened, if all were; `fixed` what has no gradient: masks, factors and dropout."""

    def __init__(self, graph: Graph, part, node: Node, form: Form):
        self.graph, self.part, self.node, self.form, self.end = graph, part, node, form, part.original(form.end)
        self.inputs = [part.original(v) for v in (form.q, form.k, form.v, *[o.value for o in form.biases])]
        self.fixed = [part.original(o.value) for o in (*form.masks, *form.factors, *form.dropped)]
        narrow = [unwidened(v) for v in self.inputs[:3]]
        self.moving = [*narrow, *self.inputs[3:]] if len({v.dtype for v in narrow}) == 1 else self.inputs
        added = (("bias", form.biases), ("mask", form.masks), ("dropout", form.dropped))
        self.label = "+".join(["attention", *[name for name, found in added if found]])
        self.config = AttentionConfig(*form.specs, form.out.replace("e", "") + "e", scale=form.scale, fill=form.fill,
                                      out_dtype=str(self.end.dtype))
        spec: dict = {name: "".join(a for a in self.config.scores if any(a in o.spec for o in found)) if found else None
                for name, found in (("bias", form.biases), ("mask", form.masks), ("factor", form.dropped))}
        self.config = dataclasses.replace(self.config, **spec)

    def matches(self, unprofitable) -> list[Match]:
        """The match, and that of the gradients if the program computes them. Raises `Unfit` where no kernel takes it."""
        self._require_precision()
        gradient = self._gradient() if self.part is not self.graph else None
        fused_away = dead_after(self.graph, (self.end, *(gradient.found if gradient else ())), ignored=self.graph.dead)
        if self.node.index not in fused_away:
            inside = [v for n in self.form.nodes for v in map(self.part.original, n.outputs) if v is not self.end]
            readers = (n for v in inside for n in v.users if n.index not in fused_away and n.index not in self.graph.dead)
            mine = {n.index for n in self.form.nodes}
            raise Unfit(f"what is inside is read by {next((n for n in readers if n.index not in mine), self.node)} too")
        types = self._types()
        direction = "backward" if gradient else "forward"  # where the program has the gradient both are worth it, or neither
        require(OP.forward, self.config, types, unprofitable, "attention", self.config, types, direction)
        saved = self._saved(types) if gradient else ()
        back = [self._backward(gradient, types, saved)] if gradient else []
        scores = 2 * 4 * math.prod(self.config.sizes(*types[:3])[a] for a in self.config.scores)  # written and read again
        nodes = tuple(n for n in self.form.nodes if n.primitive == "dot_general")
        found = Match(self.label, self.node, nodes, (self._emission(saved),), tuple(self.inputs[:3]), scores)
        return [found, *back]

    def _require_precision(self):
        for node in self.form.nodes:
            if node.primitive == "dot_general":
                reason = refused_precision(config_of(node).precision, node.inputs[0].dtype)
                if reason:
                    raise Unfit(reason)

    def _operands(self, moving, fixed) -> list:
        """The op's arguments: all biases as one, all masks as one, what is dropped as one, and the values times their factors."""
        form, config = self.form, self.config
        q, k, v, *biases = moving
        arrays = iter(fixed)
        masks, factors, dropped = ([jnp.logical_not(a) if o.inverted else a for o, a in zip(found, arrays)]
                                   for found in (form.masks, form.factors, form.dropped))
        for operand, array in zip(form.factors, factors):
            v = (v * _to_layout(operand, array, config.v)).astype(v.dtype)
        if dropped:
            dropped = [dropped[0] * jnp.float32(form.rest), *dropped[1:]]
        elif form.rest != 1:
            v = v * jnp.asarray(form.rest, v.dtype)
        joined = ((form.biases, biases, config.bias, jnp.add), (form.masks, masks, config.mask, jnp.logical_and),
                  (form.dropped, dropped, config.factor, jnp.multiply))
        return [q, k, v, *[functools.reduce(join, [_to_layout(o, a, spec) for o, a in zip(found, arrays)])
                           for found, arrays, spec, join in joined if spec is not None]]

    def _types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        avals = [v.aval for v in self.moving], [v.aval for v in self.fixed]
        return tuple(jax.eval_shape(self._operands, *avals))

    def _saved(self, types) -> tuple[Value, ...]:
        """What the backward pass is given: the result as the op has it, and the statistics of every row."""
        config = dataclasses.replace(self.config, saving=True)
        return tuple(Value(out) for out in jax.eval_shape(functools.partial(OP.forward.reference, config), *types))

    def _emission(self, saved: tuple[Value, ...]) -> Emission:
        config = dataclasses.replace(self.config, saving=bool(saved))

        def run(read):
            outs = OP(config, *self._operands(list(map(read, self.moving)), list(map(read, self.fixed))))
            placed = lax.transpose(outs[0], [config.out.index(a) for a in self.form.out])
            yield self.end, placed.reshape(self.end.shape)
            yield from zip(saved, outs, strict=bool(saved))

        return Emission((*self.moving, *self.fixed), (self.end, *saved), run)

    # --- the backward pass

    def _gradient(self) -> "_Gradient | None":
        """The gradients that the program computes of q, k, v and the biases, if it does so as JAX does."""
        if len(set(self.inputs)) < len(self.inputs):
            return None
        nodes = between([*self.inputs, *self.fixed], self.end)
        if nodes is None:
            return None
        for found in gradients(self.graph, nodes, self.inputs, self.end, backward(self.graph), tuple(self.fixed)):
            made = {i: v for i, v in enumerate(found.found) if v is not None}
            if made:
                return _Gradient(found.dy, tuple(made.values()), tuple(made), tuple(found.added[i] for i in made))
        return None

    def _backward(self, gradient: "_Gradient", types, saved: tuple[Value, ...]) -> Match:
        """The gradients. Raises `Unfit` where no kernel takes them."""
        wanted = (*[i in gradient.of for i in range(3)], max(gradient.of) > 2, False, False)
        given = (True, True, True, bool(self.form.biases), bool(self.form.masks), bool(self.form.dropped))
        active = tuple(compress(wanted, given))
        linear = Linear(dataclasses.replace(self.config, saving=True), active, types, len(types) + 3)
        kept = tuple(v.aval for v in saved)
        _, refused = OP.backward.kernel(linear, (*types, *kept, kept[0]))
        extra = tuple(v for added in gradient.added for v in added)
        needs = (*self.moving, *self.fixed, *saved, gradient.dy, *extra)
        require_batch_sharding(needs)
        if depends_on(list(needs), set(map(id, gradient.found)), min(v.node.index for v in gradient.found)):
            raise Unfit("the gradients of this attention depend on each other")
        if refused:
            raise Unfit(refused)

        def run(read):
            moving, fixed = list(map(read, self.moving)), list(map(read, self.fixed))
            arrays = self._operands(moving, fixed)
            here = dataclasses.replace(linear, types=tuple(type_of(jax.typeof(a)) for a in arrays))  # as they are sharded
            sizes = self.config.sizes(*arrays[:3])
            dy = lax.transpose(read(gradient.dy).reshape([sizes[a] for a in self.form.out]),
                               [self.form.out.index(a) for a in self.config.out])
            made = iter(OP.backward(here, *arrays, *map(read, saved), dy))
            floats = arrays[: 3 + bool(self.form.biases)]
            cotangents = [next(made) if wanted else jnp.zeros_like(a) for a, wanted in zip(floats, active)]
            _, pullback = jax.vjp(lambda *moving: self._operands(moving, fixed)[: len(floats)], *moving)
            found = pullback(cotangents)
            for i, value, added in zip(gradient.of, gradient.found, gradient.added):
                yield value, sum(map(read, added), found[i].astype(value.dtype)).reshape(value.shape)

        saving = 4 * 4 * math.prod(self.config.sizes(*types[:3])[a] for a in self.config.scores)
        emission = Emission(needs, gradient.found, run)
        return Match(self.label, self.node, (), (emission,), (gradient.dy, *self.inputs[:3]), saving, "backward")


def _to_layout(operand: Operand, array, letters: str):
    return to_layout(array.reshape([n for n, label in zip(array.shape, operand.labels) if label]), operand.spec, letters)


class _Gradient(NamedTuple):
    """For the cotangent `dy` of the attention's end: the values `found` are the gradients of the inputs numbered `of`, each with
    what the program adds to it."""

    dy: Value
    found: tuple[Value, ...]
    of: tuple[int, ...]
    added: tuple[tuple[Value, ...], ...]
