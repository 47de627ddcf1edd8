"""A dense layer of the program as the op `dense`: its config, its operands, and what its result stands for."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse.analysis.canonical import constant, size
from jaxfuse.analysis.layout import inverse, to_layout
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.dense import OP, DenseConfig
from jaxfuse.patterns.kernel import require, types_of
from jaxfuse.patterns.walk import Chain, as_vector, ends_wide, longest, require_no_sharding
from jaxfuse.program.autodiff import Subgraph
from jaxfuse.program.graph import Emission, Graph, Node
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.runtime.reasons import no_kernel


class Site(NamedTuple):
    """One layer as it will run: the chain that is fused, and what computes it."""

    chain: Chain
    emission: Emission


def found(graph: Graph, part: Graph | Subgraph, row, unprofitable):
    """Yields the Match or the Refusal of a row of layers (`dense.Row`), and a Refusal for the step that was not taken."""
    label = f"{row.label}{row.unfused}{row.count}"
    try:
        sites = [_site(graph, part, layer, unprofitable) for layer in row.layers]
    except Unfit as unfit:
        yield Refusal(label, row.layers[0].node, row.operands, row.reason or unfit.reason, nodes=row.nodes)
        return
    whole = row.is_gated and not row.reason
    name = row.label if whole else label_of(sites[0].chain)
    nodes = row.nodes if whole else tuple(n for layer, site in zip(row.layers, sites) for n in _nodes(layer, site.chain))
    saved = sum(2 * np.dtype(s.chain.end.dtype).itemsize * size(s.chain.end) for s in sites if s.chain.nodes)
    yield Match(f"{name}{row.count}", row.layers[0].node, nodes, tuple(s.emission for s in sites), row.operands, saved)
    if row.reason:
        yield UnfusedStep(label, row.layers[0].node, row.operands, row.reason, nodes=row.nodes)


def product(graph: Graph, part: Graph | Subgraph, node: Node, name: str, nodes, unprofitable, wide: bool) -> Match:
    """A product with nothing after it. A `wide` one is computed in float32: XLA drops the cast to bfloat16 that follows where a
    softmax widens scores again, as it does with a product of its own. Raises `Unfit` where no kernel takes it."""
    config, out = config_of(node), part.original(node.out)
    if wide and config.out_dtype in ("bfloat16", "float16"):
        config = dataclasses.replace(config, out_dtype="float32")
    x, w = map(part.original, node.inputs)
    require(OP.forward, config, types_of(x, w), unprofitable, "dense", config, types_of(x, w))

    def run(read):
        (scores,) = OP(config, read(x), read(w))
        yield out, scores.astype(out.dtype)

    return Match(name, node, nodes, (Emission((x, w), (out,), run),), (x, w), 0)


def label_of(chain: Chain) -> str:
    """Like "dense+bias+add+gelu". Constant factors are a scale; factors that are not, with a shift, a normalisation."""
    if any(kind in ("mul", "div") and constant(value) is None for kind, value in chain.affine):
        return chain.label("dense")
    return "+".join(["dense", *chain.affine_steps, *chain.after_affine])


def config_of(node: Node, weight_left: bool = False) -> DenseConfig:
    """The op's config for this contraction. Raises `Unfit` if the op does not cover it."""
    params = node.params
    require_no_sharding(node)
    contracted, batch = params["dimension_numbers"]
    order = slice(None, None, -1 if weight_left else 1)
    precision = params["precision"]
    precision = precision[order] if isinstance(precision, tuple) else precision
    (x_contracted, w_contracted), (x_batch, w_batch) = contracted[order], batch[order]
    return DenseConfig(tuple(x_contracted), tuple(w_contracted), tuple(x_batch), tuple(w_batch), str(node.out.dtype),
                       precision=precision)


def features(layer) -> tuple[int, ...]:
    """The axes of the layer's output that its weight makes, as the op has them: last."""
    contracted, batch = layer.node.params["dimension_numbers"]
    side = 0 if layer.weight_left else 1
    return tuple(n for d, n in enumerate(layer.w.shape) if d not in (*contracted[side], *batch[side]))


def order_of(layer) -> tuple[int, ...]:
    """Which axis of the op's output each axis of `layer.start` is."""
    if not layer.weight_left:
        return layer.order
    n, outputs = layer.node.out.ndim, len(features(layer))
    return tuple((axis - outputs) % n for axis in layer.order)


def _nodes(layer, chain: Chain) -> tuple[Node, ...]:
    return (layer.node, *layer.transposes, *chain.nodes)


def _site(graph: Graph, part, layer, unprofitable) -> Site:
    """The longest chain of the layer that the kernel takes. Raises `Unfit`: why it does not take the longest of the right dtype."""
    config = config_of(layer.node, layer.weight_left)
    site, _, refused = longest(layer.chains, layer.node.out.dtype, lambda chain: _fused(graph, part, layer, config, chain, unprofitable),
                               also=lambda chain: ends_wide(part, layer.node, chain))
    if site is not None:
        return site
    assert refused, "a layer has at least the chain that ends with it"
    raise refused[1]


def _fused(graph: Graph, part, layer, config: DenseConfig, chain: Chain, unprofitable) -> Site:
    order, shape = order_of(layer), features(layer)
    straight = order == tuple(range(len(order)))
    if layer.weight_left and not straight and not layer.transposes:
        raise Unfit(f"{layer.node} has its weight on the left and makes columns: the kernel writes rows")
    if any(kind in ("mul", "div") for kind, _ in chain.affine):
        raise Unfit(no_kernel("a scale of a dense layer"))
    outputs = [d for d in order if d >= len(order) - len(shape)]
    if chain.affine and outputs != sorted(outputs):
        raise Unfit(f"the bias lies otherwise than the outputs of {layer.node}")
    needs = tuple(part.original(v) for v in (layer.x, layer.w, *[value for _, value in chain.affine]))
    channels = int(np.prod(shape))
    if any(size(value) not in (1, channels) for value in needs[2:]):
        raise Unfit(f"the bias is not one number for each of the {channels} outputs")
    z = _saved(graph, part, layer, chain)
    config = dataclasses.replace(
        config, has_bias=bool(chain.affine), has_residual=chain.residual is not None, saving=z is not None,
        activation=chain.activation or NO_ACTIVATION, out_dtype=str(chain.end.dtype))
    types = types_of(*needs[:2])
    if config.has_bias:
        types += (jax.ShapeDtypeStruct(shape, jnp.float32),)
    if config.has_residual:
        added, undo = to_layout(graph, part.original(chain.residual), chain.residual_layout, range(len(order)))
        types += (jax.ShapeDtypeStruct([layer.start.shape[d] for d in inverse(order)], added.dtype),)
        needs += (added,)
    require(OP.forward, config, types, unprofitable, "dense", config, types)
    ends = (chain.end, *([z.end] if z else []), *chain.masks)

    def run(read):
        center, _, offset = chain.coefficients(lambda value: as_vector(read(part.original(value)), channels))
        if center is not None:
            offset = -center if offset is None else offset - center
        operands = [] if offset is None else [offset.reshape(shape)]
        if config.has_residual:
            operands.append(lax.transpose(undo(read(added)), inverse(order)))
        outs = [out if straight else lax.transpose(out, order) for out in OP(config, *map(read, needs[:2]), *operands)]
        end = chain.layout.place(outs[0])
        yield part.original(chain.end), end
        if z is not None:
            yield part.original(z.end), z.layout.place(outs[1])
        for mask, array in chain.masks_from(end):
            yield part.original(mask), array

    return Site(chain, Emission(needs, tuple(map(part.original, ends)), run))


def _saved(graph: Graph, part, layer, chain: Chain) -> Chain | None:
    """The chain to what the activation is applied to, where others, such as the activation's gradient, need that too. Raises
    `Unfit` if they need what is inside even so."""
    ends = tuple(map(part.original, (chain.end, *chain.masks)))
    before = [c for c in layer.chains if not c.activation and c.affine == chain.affine and c.residual is chain.residual]
    for saved in (None, before[-1]) if chain.activation else (None,):
        fused_away = dead_after(graph, ends if saved is None else (*ends, part.original(saved.end)))
        if layer.node.index in fused_away and (saved is None or saved.end.dtype == chain.end.dtype):
            return saved
    inside = [part.original(value) for node in _nodes(layer, chain)[:-1] for value in node.outputs]
    reader = next((user for value in inside for user in value.users if user.index not in fused_away), layer.node)
    raise Unfit(f"what is inside is read by {reader} too")
