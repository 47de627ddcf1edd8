"""What autodiff has made of a convolution: the gradients of its input, its filter and its bias, which share a cotangent.

What to look for is asked of JAX itself: the transpose of the very convolution, traced for its shapes.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.canonical import constant, regions, size
from jaxfuse.analysis.layout import channels_last, in_place, inverse, transposed
from jaxfuse.ops.activations import NO_ACTIVATION, Activation, named
from jaxfuse.ops.conv.conv import OP, ConvConfig
from jaxfuse.ops.op import Linear, type_of
from jaxfuse.patterns.activation_grad import activation_grads_at
from jaxfuse.patterns.activations import is_derivative, name_activation
from jaxfuse.patterns.conv import scaled as conv_scaled
from jaxfuse.patterns.conv.forward import config_of
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import Walk, depends_on
from jaxfuse.program.autodiff import Subgraph, forward
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.runtime.reasons import no_kernel


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Nodes that compute the gradients of one convolution for the cotangent `dz` of what it gives."""

    dz: Value
    dx: Node | None
    dw: Node | None
    db: Node | None = None
    through: Value | None = None  # where dz comes from this cotangent of an activation's value, through its derivative
    saved_activation: Value | None = None  # the activation's value or its argument, which tells that
    activation: Activation = NO_ACTIVATION
    scaled: conv_scaled.Scaled | None = None  # where dz is the cotangent of the convolution times a number for each channel

    @property
    def has_bias(self) -> bool:
        return bool(self.scaled.sums) if self.scaled else self.db is not None

    @property
    def sums(self) -> list[Value]:
        return [value for value, _ in self.scaled.sums] if self.scaled else []

    @property
    def dy(self) -> Value:
        return in_place(self.dz if self.through is None else self.through)


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
    for found in _gradients(node, claimed):
        yield from _rows(graph, node, found, config, claimed, unprofitable)


def _rows(graph: Graph, node: Node, found: "Gradients", config: ConvConfig, claimed: set[int], unprofitable):
    """The Match of the first way to these gradients that a kernel takes, or why the last is refused."""
    for gradients in _ways(graph, node, found, config, claimed):
        try:
            yield _fused(graph, node, gradients, config, unprofitable)
        except Unfit as unfit:
            refused = unfit
            continue
        if gradients.dx is not None and (add := _residual_add(graph, gradients.dx.out)):
            reason = no_kernel(f"{add} of the input's gradient")
            yield UnfusedStep("conv+residual gradient", node, (gradients.dz, *node.inputs), reason, "backward")
        return
    yield Refusal(_label(gradients, False), node, (gradients.dz, *node.inputs), refused.reason, "backward")


def _ways(graph: Graph, node: Node, gradients: Gradients, config: ConvConfig, claimed: set[int]) -> Iterator[Gradients]:
    """The same gradients from a cotangent behind a scale, and behind an activation, if there is one: the furthest first. To
    look behind a number that no parameter makes is worth it only where there is an activation behind it."""
    scaled = list(conv_scaled.ways(graph, node, gradients.dz, config.out_spec[1])) if gradients.dw else []
    behind = [dataclasses.replace(gradients, dz=way.g, scaled=way) for way in scaled]
    for way in sorted([*behind, gradients], key=lambda way: 1 if way is gradients else 2 * way.scaled.is_number):
        way = _with_bias(way, config)
        yield from filter(None, (_through_slope(graph, node, way, config, claimed) or _through_mask(graph, way),))
        if way.scaled and not way.scaled.is_number:
            yield way
    yield _with_bias(gradients, config)


SAME_VALUES = {named("maximum0"): named("relu"), named("clip6"): named("relu6")}  # and at ties another derivative


def _residual_add(graph: Graph, dx: Value) -> Node | None:
    """The sum of dx with another gradient of the same value, as a skip connection has it."""
    reader = dx.users[0] if len(dx.users) == 1 and not graph.is_returned(dx) else None
    return reader if reader is not None and reader.primitive == "add_any" else None


def _gradients(node: Node, claimed: set[int]) -> list[Gradients]:
    x, w = node.inputs
    if x.literal is not None or w.literal is not None:
        return []
    of_x, of_w = gradient_steps(node.eqn.primitive, static_key(node.params), *[(v.shape, v.dtype) for v in (x, w)])
    dxs = {id(n.inputs[0]): n for n in applied(w, of_x) if n.index not in claimed}
    dws = {id(n.inputs[1]): n for n in applied(x, of_w) if n.index not in claimed}
    both = [Gradients(dxs[key].inputs[0], dxs[key], dws[key]) for key in dxs if key in dws]
    # Where the filter or the input also serves other convolutions, the gradient may be half of a pair of theirs.
    dx_alone = [Gradients(n.inputs[0], n, None) for n in dxs.values() if not _convolved(n.inputs[0], 1)]
    dw_alone = [Gradients(n.inputs[1], None, n) for n in dws.values() if not _convolved(n.inputs[1], 0)]
    return both or dx_alone + dw_alone


def _convolved(value: Value, operand: int) -> bool:
    return any(n.primitive == "conv_general_dilated" and n.inputs[operand] is value for n in value.users)


def static_key(params: dict):
    return tuple(sorted(params.items()))


@functools.lru_cache(maxsize=4096)
def gradient_steps(primitive, params, x, w):
    """The equations, each (primitive's name, parameters), by which the gradient of x comes from w and the cotangent, and
    that of w from x and the cotangent; the last of each is the convolution."""
    x, w = (jax.ShapeDtypeStruct(*of) for of in (x, w))
    conv = functools.partial(primitive.bind, **dict(params))
    y = jax.eval_shape(conv, x, w)
    of_x = jax.make_jaxpr(lambda w, g: jax.linear_transpose(lambda x: conv(x, w), x)(g))(w, y)
    of_w = jax.make_jaxpr(lambda x, g: jax.linear_transpose(lambda w: conv(x, w), w)(g))(x, y)
    return [[(eqn.primitive.name, eqn.params) for eqn in traced.jaxpr.eqns] for traced in (of_x, of_w)]


def applied(value: Value, steps) -> list[Node]:
    """The nodes that end this chain of equations from the value."""
    found = [value]
    for name, params in steps:
        nodes = [n for v in found for n in v.users if n.primitive == name and _unsharded(n) == params]
        found = [n.out for n in nodes]
    return list({n.index: n for n in nodes}.values())


def _unsharded(node: Node) -> dict:
    """Under a mesh, transposition writes down the sharding that the output has anyway."""
    params = node.params
    if params.get("out_sharding") is None:
        return params
    spec = params["out_sharding"].spec
    return params | {"out_sharding": None} if not any(spec) or spec == node.out.aval.sharding.spec else params


def _with_bias(gradients: Gradients, config: ConvConfig) -> Gradients:
    """The sum of the cotangent over all but its channels; where the value is scaled, its sums have that."""
    if gradients.scaled:
        return gradients
    others = tuple(d for d in range(gradients.dz.ndim) if d != config.out_spec[1])
    sums = [n for n in gradients.dz.users if n.primitive == "reduce_sum" and tuple(sorted(n.params["axes"])) == others]
    return dataclasses.replace(gradients, db=sums[0]) if sums else gradients


def _through_mask(graph: Graph, gradients: Gradients) -> Gradients | None:
    """Looks through the activation's derivative, select(z > 0, 0, dy), to y and dy."""
    node = gradients.dz.producer
    if node is None or node.primitive != "select_n" or len(node.inputs) != 3 or constant(node.inputs[1]) != 0:
        return None
    mask = node.inputs[0]
    for region in _regions_of(graph, mask):
        found = name_activation(region) if any(m is mask for m in region.masks) else None
        if not isinstance(found, Activation):
            continue
        found = SAME_VALUES.get(found, found)  # max(z, 0) with the derivative of relu is a relu
        if found.derivative_from_y and is_derivative(region, mask, found):
            return dataclasses.replace(gradients, through=node.inputs[2], saved_activation=region.end, activation=found)
    return None


def _through_slope(graph: Graph, node: Node, gradients: Gradients, config: ConvConfig, claimed: set[int]) -> Gradients | None:
    """The same through dy·act'(z), of the activation that follows in the forward pass."""
    part = forward(graph)
    own = part.node_in_subgraph(node) if isinstance(part, Subgraph) else None
    chains = Walk(part, config.out_spec[1], claimed, name_activation).chains(own.out)[0] if own else []
    for chain in chains[::-1]:  # of hard_sigmoid relu6 is a part
        if chain.activation is None or chain.region.start.dtype != node.out.dtype:
            continue
        z, dz = part.original(chain.region.start), gradients.dz
        slopes = (slope for slope in activation_grads_at(graph, z, dz) if slope.dy.aval == dz.aval and slope.is_of(chain.activation))
        if slope := next(slopes, None):
            activated = dataclasses.replace(config, activation=chain.activation)
            saved_activation = z if activated.derivative == "z" else part.original(chain.region.end)
            return dataclasses.replace(gradients, through=slope.dy, saved_activation=saved_activation, activation=chain.activation)
    return None


def _regions_of(graph: Graph, mask: Value):
    """The elementwise functions of the value that the mask compares."""
    value = mask
    while value.dtype == bool and value.producer is not None:
        value = next((v for v in value.producer.inputs if constant(v) is None), None)
        if value is None:
            return []
    return regions(value, graph.is_returned)


def _label(gradients: Gradients, with_add: bool) -> str:
    bias = ["bias"] * gradients.has_bias
    if gradients.scaled:
        steps = ["bn"] if bias and not gradients.scaled.is_number else [*bias, "scale"]
    else:
        steps = bias
    parts = ["conv", *steps, *["add"] * with_add]
    return "+".join([*parts, *[gradients.activation.name] * (gradients.saved_activation is not None)])


def _fused(graph: Graph, node: Node, gradients: Gradients, config: ConvConfig, unprofitable) -> Match:
    """Raises `Unfit` where no kernel takes them."""
    x, w = node.inputs
    dx, dw, db, saved_activation, scaled = gradients.dx, gradients.dw, gradients.db, gradients.saved_activation, gradients.scaled
    wanted = [n.out for n in (dx, dw, db) if n is not None]
    dz_too = saved_activation is not None and _is_read_elsewhere(graph, gradients, wanted + gradients.sums)
    made = (*wanted, *[gradients.dz] * dz_too)
    inputs = _order(graph, config.lhs_spec, [x, *[n.out for n in (dx,) if n]])
    outputs = _order(graph, config.out_spec, [v for v in (gradients.dz, gradients.dy, saved_activation) if v])
    orders = {**dict.fromkeys(map(id, [x, *wanted[: dx is not None]]), inputs),
              **dict.fromkeys(map(id, [gradients.dz, gradients.dy, saved_activation]), outputs)}
    channel_axis, filters = config.out_spec[1], config.rhs_spec[0]
    config = dataclasses.replace(
        config, lhs_spec=_moved(config.lhs_spec, inputs), out_spec=_moved(config.out_spec, outputs), has_bias=gradients.has_bias,
        has_residual=dz_too, activation=gradients.activation)
    config = OP.for_autodiff(config)

    def to_layout(value: Value) -> Value:
        return transposed(graph, value, orders[id(value)]) if id(value) in orders else value

    needs = tuple(map(to_layout, (x, w, *[saved_activation] * (saved_activation is not None), gradients.dy)))
    defines = tuple({id(v): v for value in (*made, *gradients.sums) for v in (to_layout(value), value)}.values())
    bias = _types([db.out]) if db else (jax.ShapeDtypeStruct((node.out.shape[channel_axis],), jnp.float32),) * config.has_bias
    types = (*_types(map(to_layout, (x, w))), *bias, *_types([to_layout(gradients.dz)] * dz_too))
    active = (dx is not None, dw is not None, *[True] * (config.has_bias + config.has_residual))
    linear = Linear(config, active, types, len(needs) - 1)
    require(OP.backward, linear, _types(needs), unprofitable, "conv", config, types, "backward")
    factors = scaled.needs if scaled else ()
    if depends_on([*needs, *factors], set(map(id, defines)), min(v.producer.index for v in (*made, *gradients.sums))):
        raise Unfit("the convolution's gradients depend on each other")

    def run(read):
        operands = [*map(read, needs)]
        if scaled:
            operands[1] = scaled.times(read, operands[1], filters)
        arrays = OP.backward(linear, *operands)
        if scaled:
            at = int(active[0])  # of the filter's gradient
            yield from scaled.results(read, read(w), filters, arrays[at], arrays[at + 1] if config.has_bias else None)
            arrays = [*arrays[:at], scaled.times(read, arrays[at], filters), *arrays[at + 1 + config.has_bias :]]
        for value, array in zip(made, arrays):
            yield to_layout(value), array
            if to_layout(value) is not value:
                yield value, jnp.transpose(array, inverse(orders[id(value)]))

    saved = np.dtype(x.dtype).itemsize * size(gradients.dz) * (config.has_bias + 2 * (saved_activation is not None))
    emission = Emission((*needs, *factors), defines, run)
    return Match(_label(gradients, dz_too), node, (), (emission,), (gradients.dy, x, w), saved, "backward")


def _order(graph: Graph, spec, values: list[Value]) -> tuple[int, ...]:
    """Channels last, if another fused op gives or wants one of the values so; else as they are."""
    order = channels_last(len(spec), spec[1])
    return order if any((id(v), order) in graph.transposes for v in values) else tuple(range(len(spec)))


def _moved(spec, order):
    return tuple(inverse(order)[d] for d in spec)


def _types(values) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(type_of(v.aval) for v in values)


def _is_read_elsewhere(graph: Graph, gradients: Gradients, wanted: list[Value]) -> bool:
    fused_away = dead_after(graph, tuple(wanted))
    return graph.is_returned(gradients.dz) or any(n.index not in fused_away for n in gradients.dz.users)
