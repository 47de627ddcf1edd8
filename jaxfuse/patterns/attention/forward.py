"""Attention: the products with the keys and the values and the softmax between them as one op, and its gradients, which are JAX's
own of these nodes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.analysis.gradients import Gradient, gradients
from jaxfuse.analysis.normal import constant, unwidened
from jaxfuse.analysis.regions import cone
from jaxfuse.ops.arrays import wide
from jaxfuse.ops.attention import MASKED, OP
from jaxfuse.ops.attention_config import AttentionConfig, to_layout
from jaxfuse.ops.dense import refused_precision
from jaxfuse.ops.op import Linear
from jaxfuse.ops.stage import type_of
from jaxfuse.patterns.attention.axes import Operand
from jaxfuse.patterns.attention.form import Form, read_form
from jaxfuse.patterns.dense.site import batch_axes, config_of, is_product
from jaxfuse.patterns.kernel import gradient_emission, require, require_unread
from jaxfuse.program.autodiff import backward, forward
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead
from jaxfuse.program.site import Match, Refusal, Unfit
from jaxfuse.runtime.reasons import no_kernel

RANDOM = ("random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32")  # what a dropout's mask is made of


def anchors(graph):
    return [n for n in forward(graph).nodes if is_product(n) and batch_axes(n)]


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields the Match of an attention and of its gradients, or a Refusal; nothing if no softmax follows this product."""
    part = forward(graph)
    for unscaled in (True, False):  # others may read what scales q and k, as their gradients do
        try:
            form = read_form(part, node, dead(graph), unscaled)
            yield from _Site(graph, part, node, form).matches(unprofitable) if form else ()
            return
        except Unfit as unfit:
            reason = unfit.reason
    yield Refusal("attention", node, tuple(node.inputs), reason)  # its products are rows of their own


class _Site:
    """An attention as it will run. `inputs` are q, k, v and the biases as its nodes read them, `primals` the same before the first three
    were widened, if all were; `fixed` what has no gradient: masks, factors and dropout."""

    def __init__(self, graph: Graph, part, node: Node, form: Form):
        self.graph, self.part, self.node, self.form, self.end = graph, part, node, form, part.original(form.end)
        self.inputs = [part.original(v) for v in (*form.qkv, *[o.value for o in form.biases])]
        self.fixed = [part.original(o.value) for o in (*form.masks, *form.factors, *form.dropout)]
        narrow = [unwidened(v) for v in self.inputs[:3]]
        self.primals = [*narrow, *self.inputs[3:]] if len({v.dtype for v in narrow}) == 1 else self.inputs
        added = dict(bias=form.biases, mask=form.masks, dropout=form.dropout)
        self.label = "+".join(["attention", *[name for name, found in added.items() if found]])
        config = AttentionConfig(*form.specs, form.out.replace("e", "") + "e", scale=form.scale, fill=_fill(form),
                                 out_dtype=str(self.end.dtype))

        def spec(found: list[Operand]) -> str | None:
            return "".join(a for a in config.scores if any(a in o.spec for o in found)) if found else None

        self.config = dataclasses.replace(config, bias=spec(form.biases), mask=spec(form.masks), factor=spec(form.dropout))

    def matches(self, unprofitable) -> list[Match]:
        """The match, and that of the gradients if the program computes them. Raises `Unfit` where no kernel takes it."""
        self._require_precision()
        grows = self.form.factors or not self.form.dropout and abs(self.form.softmax_scale) > 1
        if self.primals[2].dtype == jnp.float16 and grows:
            raise Unfit(no_kernel("a factor of float16 values, which may overflow"))
        gradient = self._gradient() if self.part is not self.graph else None
        require_unread(self.graph, self.form.nodes, (self.end, *(gradient.defines if gradient else ())))
        avals = [v.aval for v in self.primals], [v.aval for v in self.fixed]
        types = tuple(jax.eval_shape(self._operands, *avals))
        direction = "backward" if gradient else "forward"  # where the program has the gradient both are worth it, or neither
        require(OP.forward, self.config, types, unprofitable, "attention", self.config, types, direction)
        saved = self._saved(types) if gradient else ()
        sizes = self.config.sizes(*types[:3])
        scores = 2 * 4 * math.prod(sizes[a] for a in self.config.scores)  # written and read again
        nodes = tuple(n for n in self.form.nodes if n.primitive == "dot_general")
        found = [Match(self.label, self.node, nodes, (self._emission(saved),), tuple(self.inputs[:3]), scores)]
        if gradient:
            back = self._backward(gradient, saved)
            found.append(Match(self.label, self.node, (), (back,), (gradient.dy, *self.inputs[:3]), 2 * scores, "backward"))
        return found

    def _require_precision(self):
        for node in self.form.nodes:
            if node.primitive == "dot_general":
                reason = refused_precision(config_of(node).precision, node.inputs[0].dtype)
                if reason:
                    raise Unfit(reason)

    def _operands(self, primals, fixed) -> list:
        """The op's arguments: all biases as one, all masks as one, all dropout as one, and the values times their factors."""
        form, config = self.form, self.config
        q, k, v, *biases = primals
        arrays = iter(fixed)
        biases = [wide(a) for a in biases] if len(biases) > 1 else biases  # the sum of two is none of 16 bits
        masks, factors, dropout = ([jnp.logical_not(a) if o.inverted else a for o, a in zip(found, arrays)]
                                   for found in (form.masks, form.factors, form.dropout))
        for operand, array in zip(form.factors, factors):
            v = (v * _to_layout(operand, array, config.v)).astype(v.dtype)
        if dropout:
            dropout = [dropout[0] * jnp.float32(form.softmax_scale), *dropout[1:]]
        elif form.softmax_scale != 1:
            v = v * jnp.asarray(form.softmax_scale, v.dtype)
        combined = ((form.biases, biases, config.bias, jnp.add), (form.masks, masks, config.mask, jnp.logical_and),
                  (form.dropout, dropout, config.factor, jnp.multiply))
        return [q, k, v, *[functools.reduce(join, [_to_layout(o, a, spec) for o, a in zip(found, arrays)])
                           for found, arrays, spec, join in combined if spec is not None]]

    def _saved(self, types) -> tuple[Value, ...]:
        """What the backward pass is given: the result as the op has it, and the statistics of every row."""
        config = dataclasses.replace(self.config, with_residuals=True)
        return tuple(map(Value, jax.eval_shape(functools.partial(OP.forward.reference, config), *types)))

    def _emission(self, saved: tuple[Value, ...]) -> Emission:
        config = dataclasses.replace(self.config, with_residuals=bool(saved))

        def run(read):
            outs = OP(config, *self._operands(list(map(read, self.primals)), list(map(read, self.fixed))))
            placed = lax.transpose(outs[0], [config.out.index(a) for a in self.form.out])
            yield self.end, placed.reshape(self.end.shape)
            yield from zip(saved, outs, strict=bool(saved))

        return Emission((*self.primals, *self.fixed), (self.end, *saved), run)

    # --- the backward pass

    def _gradient(self) -> Gradient | None:
        """The gradients that the program computes of q, k, v and the biases, if it does so as JAX does."""
        if len(set(self.inputs)) < len(self.inputs):
            return None
        found = gradients(self.graph, self.inputs, self.end, backward(self.graph), self.fixed)
        return next((gradient for gradient in found if gradient.defines), None)

    def _backward(self, gradient: Gradient, saved: tuple[Value, ...]) -> Emission:
        """The gradients, of the op's own arguments and from there of what these are made of. Raises `Unfit` where they wait for each
        other."""
        config = dataclasses.replace(self.config, with_residuals=True)
        wanted = [value is not None for value in gradient.found[:3]] + ([any(gradient.found[3:])] if self.form.biases else [])

        def arrays(read):
            primals, fixed = list(map(read, self.primals)), list(map(read, self.fixed))
            operands = self._operands(primals, fixed)
            active = (*wanted, *[False] * (len(operands) - len(wanted)))
            linear = Linear(config, active, tuple(type_of(jax.typeof(a)) for a in operands), len(operands) + len(saved))
            sizes = config.sizes(*operands[:3])
            dy = lax.transpose(read(gradient.dy).reshape([sizes[a] for a in self.form.out]), [self.form.out.index(a) for a in config.out])
            given = iter(OP.backward(linear, *operands, *map(read, saved), dy))
            cotangents = [next(given) if is_wanted else jnp.zeros_like(a) for a, is_wanted in zip(operands, wanted)]
            return jax.vjp(lambda *primals: self._operands(primals, fixed)[: len(wanted)], *primals)[1](cotangents)

        return gradient_emission(gradient, (*self.primals, *self.fixed, *saved), arrays)


def _fill(form: Form) -> float:
    """The score where a mask is False. A mask after the softmax is a factor to the kernel, and NaN·0 is NaN: where it is the mask before
    the softmax, rows without any score get a finite one, and end as 0 as well. Raises `Unfit` where such rows cannot be told."""
    before = [o.value for o in form.masks]
    after = {o for o in form.dropout if o.value.dtype == bool and not _is_dropout(o.value, before)}
    if not after or not (form.biases or form.masks and form.fill == -math.inf):
        return form.fill
    if form.biases or not after.issuperset(form.masks):
        raise Unfit(no_kernel("a mask after the softmax that may clear rows which are -inf before it"))
    return MASKED


def _is_dropout(mask: Value, before: list[Value]) -> bool:
    """Whether it is random, and computed from nothing that the masks before are computed from too."""
    nodes, others = (cone(values, lambda value: True) for values in ([mask], before))
    mine, theirs = ({v for n in found for v in (*n.inputs, *n.outputs) if constant(v) is None} for found in (nodes, others))
    return any(node.primitive in RANDOM for node in nodes) and mine.isdisjoint([*theirs, *before])


def _to_layout(operand: Operand, array, letters: str):
    return to_layout(array.reshape([n for n, label in zip(array.shape, operand.labels) if label]), operand.spec, letters)
