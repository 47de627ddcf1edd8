"""The convolution on CUDA, by a plan of cuDNN's graph API, with what follows it.

XLA:GPU itself makes one kernel of a convolution with a bias of its own dtype, a residual and relu. Other activations, a scale per
channel and a float32 bias on bfloat16 it leaves as passes of their own.
"""

import hashlib

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.stage import Kernel
from jaxfuse.runtime import cuda
from jaxfuse.runtime.cudnn import graph, plans
from jaxfuse.runtime.reasons import no_kernel

TARGET = "jaxfuse_cudnn_graph"
_DTYPES = ("bfloat16", "float16")


def _refuse(config, args) -> str | None:
    return _refuse_arrays(config, args) or cuda.unavailable(TARGET) or _refuse_plan(config, args)


def _refuse_arrays(config, args) -> str | None:
    x, w, *_ = args
    if reason := config.refuse_out_dtype():
        return reason
    if config.feature_group_count > 1:
        return no_kernel(f"feature_group_count {config.feature_group_count}")
    if str(x.dtype) not in _DTYPES:
        return f"dtype {x.dtype}: cuDNN's kernel is used for {' and '.join(_DTYPES)}"
    if any(0 in a.shape for a in args):
        return "an empty array"
    if len(x.shape) not in (4, 5):
        return f"x of rank {len(x.shape)}: cuDNN's kernel takes 4 and 5"
    if config.transposed:
        return f"lhs_dilation {config.lhs_dilation}: cuDNN's kernel takes none"
    if min(min(pair) for pair in config.padding) < 0:
        return f"negative padding {config.padding}"
    if (config.lhs_spec, config.out_spec) != (_channels_last(len(x.shape)),) * 2:
        return f"axes {config.lhs_spec} -> {config.out_spec}: cuDNN's kernel takes channels-last"
    known = config.activation == NO_ACTIVATION or config.activation.cudnn
    return None if known else f"cuDNN has no {config.activation.name}"


def _refuse_plan(config, args) -> str | None:
    found = plans.plan(_graph(config, args))
    return f"no plan by cuDNN: {found}" if isinstance(found, str) else None


def _channels_last(rank: int):
    return (0, rank - 1, *range(1, rank - 1))


def _filter_axes(config):
    """Output features, spatial axes, input features: as cuDNN's tensor-core engines want it."""
    features, inputs, *spatial = config.rhs_spec
    return (features, *spatial, inputs)


def _out_shape(config, x, w):
    def extent(axis, i):
        low, high = config.padding[i]
        reach = (w.shape[config.rhs_spec[2 + i]] - 1) * config.rhs_dilation[i]
        return (x.shape[axis] + low + high - reach - 1) // config.window_strides[i] + 1

    n, _, *spatial = config.lhs_spec
    return (x.shape[n], *[extent(axis, i) for i, axis in enumerate(spatial)], w.shape[config.rhs_spec[0]])


def _graph(config, args) -> graph.Graph:
    x, w, scale, bias, residual = config.unpack(args)
    axes, channels = _channels_last(len(x.shape)), w.shape[config.rhs_spec[0]]
    y = graph.row_major(x.dtype, _out_shape(config, x, w), axes)
    filter_shape = tuple(w.shape[d] for d in _filter_axes(config))
    return graph.convolution(
        graph.row_major(x.dtype, x.shape, axes), graph.row_major(w.dtype, filter_shape, axes), y,
        graph.window_of(config.window_strides, config.padding, config.rhs_dilation),
        scale=None if scale is None else graph.per_channel("float32", channels, len(axes)),
        bias=None if bias is None else graph.per_channel(bias.dtype, channels, len(axes)),
        residual=None if residual is None else y, activation=config.activation.cudnn,
        residual_last=config.residual_last, returns_z=bool(config.residual_outs))


def _run(config, args, mesh_axes):
    described = _graph(config, args)
    plan = plans.plan(described)
    if isinstance(plan, str):
        raise RuntimeError(plan)  # not what was planned when the kernel was asked
    x, w, scale, bias, residual = config.unpack(args)
    w = lax.transpose(w, _filter_axes(config))
    scale = None if scale is None else scale.astype(jnp.float32)
    operands = [a for a in (x, w, scale, bias, residual) if a is not None]
    y = jax.ShapeDtypeStruct(_out_shape(config, *args[:2]), x.dtype)
    workspace = jax.ShapeDtypeStruct((plan.workspace,), jnp.uint8)
    *outs, _ = cuda.call(
        TARGET, [*[y] * (1 + config.residual_outs), workspace], *operands, plan=plan.text,
        digest=hashlib.sha256(plan.text.encode()).hexdigest(), uids=described.bound, operands=len(operands),
        what=f"conv of {x.dtype} {tuple(x.shape)}, activation {config.activation.name}")
    return tuple(outs)


KERNEL = Kernel("cudnn", _refuse, _run, platform="cuda")
