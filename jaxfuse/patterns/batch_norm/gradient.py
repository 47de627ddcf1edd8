"""What autodiff has made of a training batch norm: sums over the batch, and the gradient of x. See analysis/forms.py."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import constant, size, unwidened
from jaxfuse.analysis.forms import Form, Forms, Vector, batch_sum, is_sum_of_gradient, number
from jaxfuse.analysis.layout import channels_last, inverse, transposed
from jaxfuse.analysis.statistics import Statistics
from jaxfuse.ops.batch_norm_grad import DX, SUMS, GradientConfig
from jaxfuse.patterns.activation_grad import ActivationGrad, activation_grads_at
from jaxfuse.patterns.activations import is_derivative
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import Chain, depends_on
from jaxfuse.program.graph import Emission, Graph, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match

NOTHING: frozenset[int] = frozenset()  # a forward pass whose value nobody reads is fused all the same: its steps are not the gradient's
FUSED_BY_XLA = "XLA moves less, for it computes what is beside it along with it"


class SavedActivation(NamedTuple):
    """What the activation's derivative is computed from: `values` are the last operands of the gradient's passes."""

    config: GradientConfig
    values: tuple[Value, ...]


class Gradient(NamedTuple):
    """g: the cotangent of the normalised value; sums: over the batch, of g and of products with it; zeros: sums of forms of
    x alone, of which only the offset is left; results: what has the form a·g + b·(x - mean) + c, and is read as a gradient;
    nodes: indices of what is no longer needed then."""

    statistics: Statistics
    forms: Forms
    g: Value
    sums: list[tuple[Value, Form]]
    zeros: list[tuple[Value, Form]]
    results: list[tuple[Value, Form]]
    nodes: frozenset[int]
    slope: ActivationGrad | None = None  # through which g comes from the cotangent of an activation's value

    @property
    def mean(self) -> Value:
        return self.statistics.means[0]

    @property
    def defines(self) -> tuple[Value, ...]:
        return tuple(value for value, _ in (*self.sums, *self.zeros, *self.results))


def find(graph: Graph, statistics: Statistics) -> Gradient | None:
    """The gradient through the batch statistics of x, if the program computes it."""
    x = statistics.x
    products = (product for _, form in Forms(x, statistics.axis, statistics.means).sums if form.degree > 1 for product in form.terms)
    tensors = dict.fromkeys(tensor for product in products for tensor in product if tensor is not x)
    if not tensors:
        return None
    forms = Forms(x, statistics.axis, statistics.means, sorted(tensors, key=_index))
    sums = _first([(value, form) for value, form in forms.sums if is_sum_of_gradient(form, x)])
    zeros = [(value, form) for value, form in forms.sums
             if form.degree == 1 and form.tensors == {x} and value not in statistics.known]
    cotangents = {t for _, form in sums for t in form.tensors} - {x}
    if len(cotangents) != 1:
        return None
    (g,) = cotangents
    results = _results(graph, forms, x, g)
    fused_away = dead_after(graph, tuple(value for value, _ in (*sums, *zeros, *results)), kept=g, ignored=NOTHING)
    return Gradient(statistics, forms, g, sums, zeros, results, frozenset(fused_away))


def through_activation(graph: Graph, gradient: Gradient) -> Iterator[Gradient]:
    """The same gradient from the cotangent of an activation's value, where g is that times a function of a value which is
    computed from x, per channel and with other tensors added."""
    arguments = [value for value, form in gradient.forms.of.items() if form.degree == 1 and value.producer
                 and gradient.statistics.x in form.tensors and gradient.g not in form.tensors]
    for z in sorted(arguments, key=_index, reverse=True):
        for slope in activation_grads_at(graph, z, gradient.g):
            fused_away = dead_after(graph, (*gradient.defines, gradient.g), kept=slope.dy, ignored=NOTHING)
            yield gradient._replace(nodes=frozenset(fused_away), slope=slope)


def _index(value: Value) -> int:
    """Of the node that computes it."""
    return value.producer.index if value.producer else -1


def _first(sums: list[tuple[Value, Form]]) -> list[tuple[Value, Form]]:
    """Those that need none of the others: a sum of the result, a bias gradient, is not one of those behind the result."""
    sums = sorted(sums, key=lambda known: known[0].node.index)
    found: list[tuple[Value, Form]] = []
    for value, form in sums:
        if not depends_on(form.needs, [v for v, _ in found]):
            found.append((value, form))
    return found


def _results(graph: Graph, forms: Forms, x: Value, g: Value) -> list[tuple[Value, Form]]:
    """Values with g and x in their form that are read by something else than more of it."""
    found: list[tuple[Value, Form]] = []
    for value, form in sorted(forms.of.items(), key=lambda known: _index(known[0])):
        if form.degree > 1 or not {x, g} <= form.tensors or value.aval.shape != x.shape or value.dtype != x.dtype:
            continue
        if value.producer is None or any(known is operand for known, _ in found for operand in value.producer.inputs):
            continue
        if graph.is_returned(value) or any(node.index not in forms.nodes for node in value.users):
            found.append((value, form))
    return found


def mask_of(gradient: Gradient, chain: Chain) -> Value | None:
    """The comparison that gates the cotangent, if it is the derivative of the chain's activation."""
    node = gradient.g.producer
    if node is None or node.primitive != "select_n" or len(node.inputs) != 3 or constant(node.inputs[1]) != 0:
        return None
    mask = node.inputs[0]
    known = chain.region and chain.activation and mask in chain.masks and is_derivative(chain.region, mask, chain.activation)
    return mask if known else None


def fused(graph: Graph, gradient: Gradient, label: str, anchor, saved: SavedActivation | None, xla_fuses_neighbour: bool,
          unprofitable) -> Match:
    """`saved` is what the forward pass keeps of the activation's derivative, `xla_fuses_neighbour`: XLA can
    compute a neighbour along with it; whether it is to, policy says. Raises `Unfit` where no kernel takes them."""
    statistics, g, x = gradient.statistics, gradient.g, gradient.statistics.x
    order = channels_last(x.ndim, statistics.axis)
    dy, config = g, GradientConfig(0)
    if saved:
        dy = unwidened(gradient.slope.dy) if gradient.slope else g.node.inputs[2]
        config = saved.config
    config = dataclasses.replace(config, axis=x.ndim - 1)
    dy_last, x_last, masks = transposed(graph, dy, order), transposed(graph, x, order), saved.values if saved else ()
    vector = jax.ShapeDtypeStruct((x.shape[statistics.axis],), jnp.float32)
    full = [jax.ShapeDtypeStruct([v.shape[d] for d in order], v.dtype) for v in (dy, x)]
    if xla_fuses_neighbour:
        cost = unprofitable("batch_norm", config, full, "backward", cost=FUSED_BY_XLA)
        config = dataclasses.replace(config, xla_fuses_neighbour=bool(cost))
    require(SUMS, config, (*full, vector, *masks), unprofitable, "batch_norm", config, full, "backward")
    factors = [need for _, form in gradient.sums for need in form.needs]

    def operands(read):
        return read(dy_last), read(x_last), jnp.asarray(read(gradient.mean)).astype(jnp.float32).reshape(-1)

    def run_sums(read):
        sum_g, sum_gx = SUMS(config, *operands(read), *map(read, masks))
        for value, form in gradient.sums:
            yield value, batch_sum(form, x, g, sum_g, sum_gx, statistics.count, read).astype(value.dtype).reshape(value.shape)

    full_needs = (dy_last, x_last, gradient.mean, *masks)
    emissions = [Emission((*full_needs, *factors), tuple(value for value, _ in gradient.sums), run_sums)]
    emissions += [_zero(statistics, *zero) for zero in gradient.zeros]
    emissions += [_result(graph, gradient, config, operands, full_needs, *result, saved is not None and i == 0)
                  for i, result in enumerate(gradient.results)]
    bytes_saved = np.dtype(x.dtype).itemsize * size(x) * 4
    return Match(label, anchor, (), tuple(emissions), (dy, x), bytes_saved, "backward")


def _zero(statistics: Statistics, value: Value, form: Form) -> Emission:
    """Σ(q·(x - mean) + r) = count·r"""

    offset = form.terms.get((), number(0))

    def run(read):
        total = statistics.count * offset.of(read)
        yield value, jnp.broadcast_to(total.astype(value.dtype), (size(value),)).reshape(value.shape)

    return Emission(offset.needs, (value,), run)


def _result(graph, gradient: Gradient, config, operands, full_needs, value: Value, form: Form, gated: bool) -> Emission:
    x, g, axis = gradient.statistics.x, gradient.g, gradient.statistics.axis
    channels, order = x.shape[axis], channels_last(x.ndim, axis)
    others = {tensor: form.terms[tensor,] for tensor in form.tensors - {x, g}}
    needs = (*full_needs, *others, *form.needs)
    if gated and _is_read(graph, gradient, g):
        if not depends_on(needs[len(full_needs):], [g], behind=[v for v, _ in gradient.sums]):
            config = dataclasses.replace(config, wants_g=True)
    given = (value, g) if config.wants_g else (value,)
    defines = (*given, *[transposed(graph, v, order) for v in given]) if axis != x.ndim - 1 else given

    def run(read):
        def per_channel(coefficient: Vector | None):
            made = jnp.float32(0) if coefficient is None else coefficient.of(read)
            return jnp.broadcast_to(made.astype(jnp.float32), (channels,))

        a, b, c = map(per_channel, map(form.terms.get, ((g,), (x,), ())))
        masks = [read(need) for need in full_needs[3:]]
        made = DX(config, *operands(read), a, b, c, *masks)
        for tensor, coefficient in others.items():
            made[0] = (made[0] + per_channel(coefficient) * jnp.transpose(read(tensor), order)).astype(x.dtype)
        return zip(defines, (*[jnp.transpose(array, inverse(order)) for array in made], *made))

    return Emission(needs, defines, run)


def _is_read(graph: Graph, gradient: Gradient, g: Value) -> bool:
    return graph.is_returned(g) or any(node.index not in gradient.nodes for node in g.users)
