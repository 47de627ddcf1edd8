"""What autodiff has made of a training batch norm: sums over the batch, and the gradient of x. See analysis/forms.py."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfuse.analysis.forms import ChannelForms, Form, batch_sum, is_sum_of_gradient
from jaxfuse.analysis.layout import inverse
from jaxfuse.analysis.normal import nbytes, unwidened
from jaxfuse.analysis.regions import depends_on
from jaxfuse.analysis.statistics import Statistics
from jaxfuse.ops.batch_norm_grad import DX, SUMS, GradientConfig
from jaxfuse.patterns.activation_grad import ActivationGrad, activation_grads_at
from jaxfuse.patterns.kernel import require
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match
from jaxfuse.program.transposes import transposed

FUSED_BY_XLA = "XLA moves less, for it computes what is beside it along with it"


class Gradient(NamedTuple):
    """g: the cotangent of the normalised value; sums: over the batch, of g and of products with it; zeros: sums of forms of
    x alone, with the offset, which is what is left; results: what has the form a·g + b·(x - mean) + c, and is read as a gradient;
    nodes: indices of what is no longer needed then."""

    statistics: Statistics
    forms: ChannelForms
    g: Value
    sums: dict[Value, Form]
    zeros: dict[Value, Form]
    results: dict[Value, Form]
    nodes: frozenset[int]
    slope: ActivationGrad | None = None  # through which g comes from the cotangent of an activation's value


def find(graph: Graph, statistics: Statistics) -> Gradient | None:
    """The gradient through the batch statistics of x, if the program computes it, and the mean itself."""
    x = statistics.x
    if not statistics.means:
        return None
    alone = ChannelForms(x, statistics.axis, (), statistics.means)
    tensors = {tensor for form in alone.sums.values() if form.degree > 1 for tensor in form.tensors} - {x}
    if not tensors:
        return None
    forms = ChannelForms(x, statistics.axis, sorted(tensors, key=lambda v: v.index), statistics.means)
    if found := _found(graph, statistics, forms):
        return found
    products = [v for v, (_, form) in forms.known.items() if form.degree > 1 and v.shape == x.shape and v.producer]
    for g in sorted(products, key=lambda v: v.index):  # where the normalised value is multiplied later, its cotangent has x in it
        found = _found(graph, statistics, ChannelForms(x, statistics.axis, (), statistics.means, fixed=g))
        if found and found.g is g and found.results:
            return found
    return None


def _found(graph: Graph, statistics: Statistics, forms: ChannelForms) -> Gradient | None:
    """If it is in the forms of x and of one cotangent."""
    x = statistics.x
    sums = _first({value: form for value, form in forms.sums.items() if is_sum_of_gradient(form, x)})
    zeros = {value: form.coefficients.get((), Form.number(0.0)) for value, form in forms.sums.items()
             if form.degree == 1 and form.tensors == {x} and value not in statistics.moments}
    cotangents = {tensor for form in sums.values() for tensor in form.tensors} - {x}
    if len(cotangents) != 1:
        return None
    (g,) = cotangents
    results = _results(graph, forms, x, g)
    made = (*sums, *zeros, *results, *statistics.moments)
    return Gradient(statistics, forms, g, sums, zeros, results, only_for(graph, made, live=g))


def through_activation(graph: Graph, gradient: Gradient) -> Iterator[Gradient]:
    """The same gradient from the cotangent of an activation's value, where g is that times a function of a value which is
    computed from x, per channel and with other tensors added."""
    arguments = [value for value, (_, form) in gradient.forms.known.items() if form.degree == 1 and value.producer
                 and gradient.statistics.x in form.tensors and gradient.g not in form.tensors]
    for z in sorted(arguments, key=lambda v: v.index, reverse=True):
        for slope in activation_grads_at(graph, z, gradient.g):
            if unwidened(slope.dy).dtype.itemsize > gradient.g.dtype.itemsize:  # on its way to g the program rounds dy
                continue
            made = (*gradient.sums, *gradient.zeros, *gradient.results, *gradient.statistics.moments, gradient.g)
            yield gradient._replace(nodes=only_for(graph, made, live=slope.dy), slope=slope)


def only_for(graph: Graph, made: tuple[Value, ...], live: Value) -> frozenset[int]:
    """Indices of the nodes that only these values need, up to the one that stays live. A forward pass whose value nobody reads is fused
    all the same: its steps are none of them."""
    return frozenset(dead_after(graph, made, live=live, ignored=frozenset()))


def _first(sums: dict[Value, Form]) -> dict[Value, Form]:
    """Those that need none of the others: a sum of the result, a bias gradient, is not one of those behind the result."""
    found: dict[Value, Form] = {}
    for value in sorted(sums, key=lambda v: v.index):
        if not depends_on(sums[value].needs, found):
            found[value] = sums[value]
    return found


def _results(graph: Graph, forms: ChannelForms, x: Value, g: Value) -> dict[Value, Form]:
    """Values like x with g and x in their form that are read, be it in another shape, by something else than more of it: also by
    a product that is read, or that is with another tensor."""

    @functools.cache
    def is_read(value: Value) -> bool:
        return graph.is_returned(value) or any(map(reads, value.users))

    def reads(node: Node) -> bool:
        made = forms.known.get(node.out) if node.index in forms.seen else None
        if made is None or made.form.degree < 2:
            return node.index not in forms.seen
        return bool(made.form.tensors - {x, g}) or is_read(node.out)

    read = {form for value, (_, form) in forms.known.items() if is_read(value)}
    found: dict[Value, Form] = {}
    for value in sorted(forms.known, key=lambda v: v.index):
        index_map, form = forms.known[value]
        is_like_x = (value.shape, value.dtype) == (x.shape, x.dtype) and index_map and index_map.flat == forms.index_map.flat
        if is_like_x and form.degree == 1 and {x, g} <= form.tensors and form in read and form not in found.values():
            if value.producer and found.keys().isdisjoint(value.producer.inputs):
                found[value] = form
    return found


def fused(site, gradient: Gradient) -> Match:
    """The gradient of what the site fuses; where XLA can compute a neighbour along with it, policy says whether it is to. Raises
    `Unfit` where no kernel takes it."""
    graph, statistics, g, x, order = site.graph, gradient.statistics, gradient.g, site.x, site.order
    channels, behind = x.shape[site.axis], site.derivative is not None
    dy = unwidened(gradient.slope.dy) if behind and gradient.slope else g
    config = dataclasses.replace(site.derivative or GradientConfig(0), axis=x.ndim - 1)
    vector = jax.ShapeDtypeStruct((channels,), jnp.float32)
    full = [jax.ShapeDtypeStruct([v.shape[d] for d in order], v.dtype) for v in (dy, x)]
    if site.xla_fuses_neighbour:
        cost = site.unprofitable("batch_norm", config, full, "backward", cost=FUSED_BY_XLA)
        config = dataclasses.replace(config, xla_fuses_neighbour=bool(cost))
    full_needs = (transposed(graph, dy, order), transposed(graph, x, order), next(iter(statistics.means)), *site.saved)
    require(SUMS, config, (*full, vector, *site.saved), site.unprofitable, "batch_norm", config, full, "backward")

    g_is_read = graph.is_returned(g) or any(node.index not in gradient.nodes for node in g.users)

    def operands(read):
        dy, x, mean, *saved = map(read, full_needs)
        return (dy, x, jnp.asarray(mean).astype(jnp.float32).reshape(-1)), saved

    def sums(read):
        tensors, saved = operands(read)
        sum_g, sum_gx = SUMS(config, *tensors, *saved)
        for value, form in gradient.sums.items():
            yield value, batch_sum(value, form, x, g, sum_g, sum_gx, statistics.count, read)

    def zero(value: Value, offset: Form) -> Emission:
        """Σ(q·(x - mean) + r) = count·r"""
        return Emission(offset.needs, (value,), lambda read: [(value, batch_sum(value, offset, x, g, 0, 0, statistics.count, read))])

    def result(value: Value, form: Form, may_give_g: bool) -> Emission:
        others = {tensor: form.coefficients[tensor,] for tensor in form.tensors - {x, g}}
        gives_g = may_give_g and g_is_read and not depends_on((*others, *form.needs), [g], behind=gradient.sums)
        given = (value, g) if gives_g else (value,)
        defines = (*given, *[transposed(graph, v, order) for v in given]) if site.axis != x.ndim - 1 else given

        def run(read):
            def per_channel(coefficient: Form | None):
                made = jnp.float32(0) if coefficient is None else coefficient.vector(read)
                return jnp.broadcast_to(made.astype(jnp.float32), (channels,))

            tensors, saved = operands(read)
            a, b, c = map(per_channel, map(form.coefficients.get, ((g,), (x,), ())))
            made = DX(dataclasses.replace(config, wants_g=gives_g), *tensors, a, b, c, *saved)
            for tensor, coefficient in others.items():
                made[0] = (made[0] + per_channel(coefficient) * jnp.transpose(read(tensor), order)).astype(x.dtype)
            return zip(defines, (*[jnp.transpose(array, inverse(order)) for array in made], *made))

        return Emission((*full_needs, *others, *form.needs), defines, run)

    of_sums = (*full_needs, *[v for form in gradient.sums.values() for v in form.needs])
    emissions = [Emission(of_sums, tuple(gradient.sums), sums), *[zero(*known) for known in gradient.zeros.items()],
                 *[result(*known, behind and i == 0) for i, known in enumerate(gradient.results.items())]]
    return Match(site.label, site.node, (), tuple(emissions), (dy, x), 4 * nbytes(x), "backward")
