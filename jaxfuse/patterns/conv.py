"""Convolution with what follows it: bias or inference batch norm, residual, activation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.graph import Emission, Node
from jaxfuse.match import Chain, Match, Refusal, Walk, as_vector, longest
from jaxfuse.ops.conv import OP, ConvConfig
from jaxfuse.patterns.activations import name_activation


def anchors(graph):
    """Last first: where two convolutions meet in a residual add, the later one takes the add."""
    return [node for node in reversed(graph.nodes) if node.primitive == "conv_general_dilated"]


def match(graph, node: Node, claimed: set[int], measured):
    """Yields one Match or Refusal for the convolution, and a Refusal for the step that its epilogue could not take."""
    config = config_of(node)
    if isinstance(config, str):
        yield Refusal("conv", node, tuple(node.inputs), config)
        return
    chains, stop = Walk(graph, config.out_spec[1], claimed, name_activation).chains(node.out)
    found, chain, refused = longest(chains, node.out.dtype, lambda chain: _fused(node, chain, config, measured))
    if found:
        yield found
    if refused:
        yield Refusal(refused[0].label("conv"), node, tuple(node.inputs), refused[1])
    elif stop.missed:
        yield Refusal(f"{chain.label('conv')}+{stop.missed}", node, tuple(node.inputs), stop.reason)


def config_of(node: Node) -> ConvConfig | str:
    """The op's config for this convolution, or why the op does not cover it."""
    params = node.params
    x, w = node.inputs
    if params["batch_group_count"] != 1:
        return f"batch_group_count {params['batch_group_count']}: no kernel yet on cpu"
    if any(d != 1 for d in params["lhs_dilation"]):
        return f"lhs_dilation {params['lhs_dilation']}: no kernel yet on cpu"
    if not (x.dtype == w.dtype == node.out.dtype):
        return f"dtypes {x.dtype}, {w.dtype} -> {node.out.dtype}: the kernel takes and gives one dtype"
    dn = params["dimension_numbers"]
    if dn.lhs_spec[0] != 0 or dn.out_spec[0] != 0:
        return f"batch at axis {dn.lhs_spec[0]} -> {dn.out_spec[0]}, a weight gradient: no kernel yet on cpu"
    return ConvConfig(
        tuple(params["window_strides"]), tuple(map(tuple, params["padding"])), tuple(params["rhs_dilation"]),
        params["feature_group_count"], dn.lhs_spec, dn.rhs_spec, dn.out_spec, precision=params["precision"])


def _configured(config: ConvConfig, chain: Chain) -> ConvConfig:
    kinds = {kind for kind, _ in chain.affine}
    name, alpha = chain.activation or ("none", 0.0)
    return dataclasses.replace(config, has_scale=bool(kinds & {"mul", "div"}), has_bias=bool(kinds & {"add", "sub"}),
                               has_residual=chain.residual is not None, activation=name, alpha=alpha)


def _fused(node: Node, chain: Chain, config: ConvConfig, measured) -> Match | str:
    """The match, or why not."""
    x, w = node.inputs
    if chain.residual is not None and chain.residual.dtype != x.dtype:
        return f"residual {chain.residual!r} is of another dtype than {node.out!r}"
    config = _configured(config, chain)
    residual = (chain.residual,) if chain.residual is not None else ()
    smalls = tuple(value for _, value in chain.affine)
    channels = node.out.shape[config.out_spec[1]]
    vectors = [jax.ShapeDtypeStruct((channels,), jnp.float32)] * (config.has_scale + config.has_bias)
    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, w, *residual)]
    types[2:2] = vectors
    kernel, reason = OP.forward.kernel(config, tuple(types))
    reason = reason or measured("conv", config, types)
    if reason:
        return reason
    vector = functools.partial(as_vector, channels=channels)

    def run(read):
        center, scale, offset = chain.coefficients(lambda value: vector(read(value)))
        if center is not None:  # (k - center)·scale + offset = k·scale + (offset - center·scale)
            shift = -center if scale is None else -center * scale
            offset = shift if offset is None else offset + shift
        operands = [a for a in (scale, offset, *map(read, residual)) if a is not None]
        (y,) = OP(config, read(x), read(w), *operands)
        return [(chain.end, y), *chain.masks_from(y)]

    itemsize = np.dtype(node.out.dtype).itemsize
    saved = 2 * itemsize * int(np.prod(node.out.shape)) * bool(chain.nodes)
    emission = Emission((x, w, *residual, *smalls), (chain.end, *chain.masks), run)
    return Match(chain.label("conv"), node, (node, *chain.nodes), (emission,), kernel.name, (x, w, *residual), saved)
