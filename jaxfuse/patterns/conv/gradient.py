"""What autodiff has made of a convolution: the gradients of its input, its filter and its bias, also where an activation or a
scale for each channel lies between it and the cotangent."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfuse.analysis.canonical import constant, regions
from jaxfuse.analysis.layout import channels_last, in_place, inverse, is_transposed, transposed
from jaxfuse.ops.activations import Activation, named
from jaxfuse.ops.conv.conv import OP, ConvConfig
from jaxfuse.patterns import contraction_gradients as contractions
from jaxfuse.patterns.activations import is_derivative, name_activation
from jaxfuse.patterns.contraction_gradients import Activated, Gradients
from jaxfuse.patterns.conv import scaled as conv_scaled
from jaxfuse.patterns.conv.forward import config_of
from jaxfuse.patterns.kernel import types_of
from jaxfuse.patterns.walk import Walk
from jaxfuse.program.autodiff import Subgraph, forward
from jaxfuse.program.graph import Graph, Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.runtime.reasons import no_kernel


@dataclasses.dataclass(frozen=True)
class ConvGradients(Gradients):
    """`scaled`: dz is the cotangent of the convolution times a number for each channel."""

    scaled: conv_scaled.Scaled | None = None

    @property
    def has_bias(self) -> bool:
        return bool(self.scaled.sums) if self.scaled else self.db is not None

    @property
    def sums(self) -> tuple[Value, ...]:
        return tuple(value for value, _ in self.scaled.sums) if self.scaled else ()

    @property
    def dy(self) -> Value:
        return in_place(super().dy)

    def label(self, with_dz: bool = False) -> str:
        """Like that of the layer; where the cotangent is computed too it is that of what is added."""
        steps = ["conv", "bias"] if self.has_bias else ["conv"]
        if self.scaled:
            steps = ["conv", "bn"] if self.has_bias and not self.scaled.is_number else [*steps, "scale"]
        if with_dz:
            steps.append("add")
        if self.through:
            steps.append(self.activation.name)
        return "+".join(steps)


class Site(NamedTuple):
    """The convolution whose gradients are looked for."""

    graph: Graph
    node: Node
    config: ConvConfig
    claimed: set[int]
    unprofitable: Callable


def anchors(graph: Graph):
    return [node for node in graph.nodes if node.primitive == "conv_general_dilated"]


def match(graph: Graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal for every pair of gradients of this convolution; nothing if it is not differentiated."""
    try:
        config = config_of(node)
    except Unfit:
        return  # the forward pass has a row that says why
    if config.out_dtype or node.params["batch_group_count"] != 1:
        return
    site = Site(graph, node, config, claimed, unprofitable)
    for found in contractions.found(graph, node, claimed, _may_be_alone):
        yield from _rows(site, _ways(site, found))


def _rows(site: Site, ways: Iterator[ConvGradients]):
    """The Match of the first way to these gradients that a kernel takes, or why the last is refused."""
    for way in ways:
        operands = (way.dz, *site.node.inputs)
        try:
            yield _fused(site, way)
        except Unfit as unfit:
            refused = Refusal(way.label(), site.node, operands, unfit.reason, "backward", covers=way.nodes)
            continue
        if way.dx and (add := _residual_add(site.graph, way.dx)):
            yield UnfusedStep("conv+residual gradient", site.node, operands, no_kernel(f"{add} of the input's gradient"), "backward")
        return
    yield refused


def _may_be_alone(gradients: Gradients) -> bool:
    """Whether no convolution has the cotangent where it makes the other operand's gradient: as its filter, or as its input."""
    other = 1 if gradients.dx else 0
    return not any(n.primitive == "conv_general_dilated" and n.inputs[other] is gradients.dz for n in gradients.dz.users)


def _residual_add(graph: Graph, dx: Value) -> Node | None:
    """The sum of dx with another gradient of the same value, as a skip connection has it."""
    reader = dx.users[0] if len(dx.users) == 1 and not graph.is_returned(dx) else None
    return reader if reader is not None and reader.primitive == "add_any" else None


# --- from which cotangent ----------------------------------------------------------------------------------------


def _ways(site: Site, found: Gradients) -> Iterator[ConvGradients]:
    """The same gradients from a cotangent behind a scale, and behind an activation, if there is one: the furthest first. To
    look behind a number that no parameter makes is worth it only where there is an activation behind it."""
    channels = site.config.out_spec[1]
    plain = ConvGradients(site.node, found.dz, found.dx, found.dw).with_bias(tuple(d for d in range(found.dz.ndim) if d != channels))
    scales = list(conv_scaled.ways(site.graph, site.node, found.dz, channels)) if found.dw else []
    behind = [ConvGradients(site.node, scale.g, found.dx, found.dw, scaled=scale) for scale in scales]
    by_parameters, by_numbers = ([way for way in behind if way.scaled and way.scaled.is_number == number] for number in (False, True))
    for way in by_parameters:
        yield from _behind_activation(site, way)
        yield way
    for way in (plain, *by_numbers):
        yield from _behind_activation(site, way)
    yield plain


def _behind_activation(site: Site, way: ConvGradients) -> Iterator[ConvGradients]:
    through = _through_slope(site, way.dz) or _through_mask(site.graph, way.dz)
    if through:
        yield dataclasses.replace(way, through=through)


SAME_VALUES = {named("maximum0"): named("relu"), named("clip6"): named("relu6")}  # and at ties another derivative


def _through_mask(graph: Graph, dz: Value) -> Activated | None:
    """Looks through the activation's derivative, select(z > 0, 0, dy), to y and dy."""
    node = dz.producer
    if node is None or node.primitive != "select_n" or len(node.inputs) != 3 or constant(node.inputs[1]) != 0:
        return None
    mask, _, dy = node.inputs
    for region in _regions_of(graph, mask):
        activation = name_activation(region) if mask in region.masks else None
        if not isinstance(activation, Activation):
            continue
        activation = SAME_VALUES.get(activation, activation)  # max(z, 0) with the derivative of relu is a relu
        if activation.derivative_from_y and is_derivative(region, mask, activation):
            return Activated(dy, region.end, activation, (node,))
    return None


def _through_slope(site: Site, dz: Value) -> Activated | None:
    """Looks through dy·act'(z), of the activation that follows in the forward pass."""
    part = forward(site.graph)
    own = part.node_in_subgraph(site.node) if isinstance(part, Subgraph) else None
    chains = Walk(part, site.config.out_spec[1], site.claimed, name_activation).chains(own.out)[0] if own else []
    activated = [chain for chain in chains if chain.activation and chain.region.start.dtype == site.node.out.dtype]
    return contractions.through_activation(site.graph, dz, activated, lambda chain: chain.region.end, lambda dy: dy.aval == dz.aval)


def _regions_of(graph: Graph, mask: Value):
    """The elementwise functions of the value that the mask compares."""
    value: Value | None = mask
    while value and value.dtype == bool and value.producer:
        value = next((v for v in value.producer.inputs if constant(v) is None), None)
    return regions(value, graph.is_returned) if value else []


# --- the whole ---------------------------------------------------------------------------------------------------


def _fused(site: Site, gradients: ConvGradients) -> Match:
    """Raises `Unfit` where no kernel takes them."""
    graph, node, config, (x, w), scaled = site.graph, site.node, site.config, site.node.inputs, gradients.scaled
    defined = (*gradients.wanted, *gradients.sums)
    with_dz = gradients.through is not None and contractions.is_read_elsewhere(graph, gradients.dz, defined)
    made = (*gradients.wanted, gradients.dz) if with_dz else gradients.wanted
    like_x, like_y = [v for v in (x, gradients.dx) if v], (gradients.dz, gradients.dy, *gradients.saved)
    x_order, y_order = _order(graph, config.lhs_spec, like_x), _order(graph, config.out_spec, like_y)
    orders = dict.fromkeys(like_x, x_order) | dict.fromkeys(like_y, y_order)
    channels, filters = node.out.shape[config.out_spec[1]], config.rhs_spec[0]
    config = OP.for_autodiff(dataclasses.replace(
        config, lhs_spec=_moved(config.lhs_spec, x_order), out_spec=_moved(config.out_spec, y_order), has_bias=gradients.has_bias,
        has_residual=with_dz, activation=gradients.activation))

    def to_layout(value: Value) -> Value:
        return transposed(graph, value, orders[value]) if value in orders else value

    read = tuple(map(to_layout, (x, w, *gradients.saved, gradients.dy)))
    types = types_of(*read[:2])
    if gradients.has_bias:
        types += types_of(gradients.db) if gradients.db else (jax.ShapeDtypeStruct((channels,), jnp.float32),)
    if with_dz:
        types += types_of(to_layout(gradients.dz))
    linear = contractions.backward_call(OP, gradients, config, types, types_of(*read), site.unprofitable)

    def run(reading):
        operands = [*map(reading, read)]
        if scaled:
            operands[1] = scaled.times(reading, operands[1], filters)
        arrays = [*OP.backward(linear, *operands)]
        if scaled:
            at = int(gradients.dx is not None)  # of the filter's gradient
            sum_g = arrays.pop(at + 1) if config.has_bias else None
            yield from scaled.results(reading, reading(w), filters, arrays[at], sum_g)
            arrays[at] = scaled.times(reading, arrays[at], filters)
        for value, array in zip(made, arrays):
            yield to_layout(value), array
            if to_layout(value) is not value:
                yield value, jnp.transpose(array, inverse(orders[value]))

    needs = (*read, *(scaled.needs if scaled else ()))
    defines = tuple(dict.fromkeys(v for value in (*made, *gradients.sums) for v in (to_layout(value), value)))
    return contractions.match(gradients, gradients.label(with_dz), needs, defines, run)


def _order(graph: Graph, spec: tuple[int, ...], values) -> tuple[int, ...]:
    """Channels last, if another fused op gives or wants one of the values so; else as they are."""
    order = channels_last(len(spec), spec[1])
    return order if any(is_transposed(graph, v, order) for v in values) else tuple(range(len(spec)))


def _moved(spec: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(inverse(order)[d] for d in spec)
