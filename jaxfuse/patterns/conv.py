"""Convolution with what follows it: bias or inference batch norm, residual, activation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.graph import Emission, Node
from jaxfuse.match import Chain, Match, Refusal, Stop, Walk, as_vector
from jaxfuse.ops.conv import OP, ConvConfig
from jaxfuse.patterns.activations import name_activation


def anchors(graph):
    """Last first: where two convolutions meet in a residual add, the later one takes the add."""
    return [node for node in reversed(graph.nodes) if node.primitive == "conv_general_dilated"]


def match(graph, node: Node, claimed: set[int], measured):
    """Yields one Match or Refusal for the convolution, and a Refusal for the step that its epilogue could not take."""
    config = _config(node)
    if isinstance(config, str):
        yield Refusal("conv", node, tuple(node.inputs), config)
        return
    walk = Walk(graph, config.out_spec[1], claimed, name_activation)
    chains, stop = walk.chains(node.out)
    reason = ""
    for chain in reversed(chains):
        problem = _refuse(config, chain, node)
        if problem is None:
            full = _configured(config, chain)
            kernel, reason = OP.forward.kernel(full, _types(node, chain))
            reason = reason or measured("conv", full, _types(node, chain))
            if not reason:
                yield _fused(node, chain, full, kernel.name)
                break
        elif chain is chains[-1] and problem is not _NARROWER:
            stop = Stop(problem, stop.missed)
    else:
        yield Refusal(chains[-1].label("conv"), node, tuple(node.inputs), reason or stop.reason)
        return
    if stop.missed:
        yield Refusal(f"{chain.label('conv')}+{stop.missed}", node, tuple(node.inputs), stop.reason)


def _config(node: Node) -> ConvConfig | str:
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
    reach = [w.shape[d] for d in dn.rhs_spec[2:]]
    if reach and min(reach) > LARGEST_WINDOW:
        return f"window {tuple(reach)}: as large as an image, a weight gradient; no kernel yet on cpu"
    return ConvConfig(
        tuple(params["window_strides"]), tuple(map(tuple, params["padding"])), tuple(params["rhs_dilation"]),
        params["feature_group_count"], dn.lhs_spec, dn.rhs_spec, dn.out_spec, precision=params["precision"])


LARGEST_WINDOW = 31  # the largest filter in use (RepLKNet) is 31


_NARROWER = "the chain ends in another dtype than the convolution's"


def _refuse(config: ConvConfig, chain: Chain, node: Node) -> str | None:
    if chain.end.dtype != node.out.dtype:
        return _NARROWER
    if chain.residual is not None and chain.residual.dtype != node.out.dtype:
        return f"residual {chain.residual!r} is of another dtype than {node.out!r}"
    return None


def _configured(config: ConvConfig, chain: Chain) -> ConvConfig:
    kinds = {kind for kind, _ in chain.affine}
    name, alpha = chain.activation or ("none", 0.0)
    return dataclasses.replace(config, has_scale=bool(kinds & {"mul", "div"}), has_bias=bool(kinds & {"add", "sub"}),
                               has_residual=chain.residual is not None, activation=name, alpha=alpha)


def _types(node, chain: Chain):
    """Types of the op's arguments, for the kernels to judge."""
    kinds = {kind for kind, _ in chain.affine}
    config = _config(node)
    vector = jax.ShapeDtypeStruct((node.out.shape[config.out_spec[1]],), jnp.float32)
    full = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (*node.inputs, *([chain.residual] if chain.residual else []))]
    vectors = [vector] * bool(kinds & {"mul", "div"}) + [vector] * bool(kinds & {"add", "sub"})
    return (*full[:2], *vectors, *full[2:])


def _fused(node: Node, chain: Chain, config: ConvConfig, kernel: str) -> Match:
    x, w = node.inputs
    residual = (chain.residual,) if chain.residual is not None else ()
    smalls = tuple(value for _, value in chain.affine)
    vector = functools.partial(as_vector, channels=node.out.shape[config.out_spec[1]])

    def run(read):
        center, scale, offset = chain.coefficients(lambda value: vector(read(value)))
        if center is not None:  # (k - center)·scale + offset = k·scale + (offset - center·scale)
            shift = -center if scale is None else -center * scale
            offset = shift if offset is None else offset + shift
        operands = [a for a in (scale, offset, *map(read, residual)) if a is not None]
        return zip([chain.end], OP(config, read(x), read(w), *operands))

    itemsize = np.dtype(node.out.dtype).itemsize
    saved = 2 * itemsize * int(np.prod(node.out.shape)) * bool(chain.nodes)
    return Match(chain.label("conv"), node, (node, *chain.nodes), (chain.end,), Emission((x, w, *residual, *smalls), run),
                 kernel, (x, w, *residual), saved)
