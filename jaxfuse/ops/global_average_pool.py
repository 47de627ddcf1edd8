"""global_average_pool: the mean of each channel over an image."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxfuse.ops.arrays import wide
from jaxfuse.ops.batch_axes import BatchAxes
from jaxfuse.ops.errors import Arguments, Array, checked_names
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.ops.stage import Kernel, refused_array
from jaxfuse.runtime import ffi
from jaxfuse.runtime.settings import ours


@dataclasses.dataclass(frozen=True)
class GlobalAveragePoolConfig:
    """`batch_rank`: how many axes lie before those that the mean is over; behind them are the channels."""

    batch_rank: int = 1
    residual_outs = 0

    def axes(self, rank: int) -> tuple[int, ...]:
        return tuple(range(self.batch_rank, rank - 1))


@checked_names
@ours
def global_average_pool(x: Array) -> jax.Array:
    """Global average pooling, as Keras's `GlobalAveragePooling2D`: y[n, c] = mean of x[n, ..., c], summed in float32.

    Args:
      x: float array of rank 3 or more, channels last: `[batch, *spatial, channels]`.

    Returns: y `[batch, channels]`, in x's dtype.
    Raises: OpError (a ValueError), at trace time, for another rank or dtype.
    """
    arguments = Arguments("global_average_pool")
    arguments.floats(x=x)
    arguments.check(x.ndim >= 3, "x", f"of rank {x.ndim}", "rank 3 or more", "add the missing axis")
    return OP(GlobalAveragePoolConfig(), x)[0].astype(x.dtype)


def _reference(config: GlobalAveragePoolConfig, x):
    return (wide(x).mean(config.axes(x.ndim)),)


def _tangent(config: GlobalAveragePoolConfig, residuals, tangents):
    return _reference(config, *tangents)


def _refuse(config: GlobalAveragePoolConfig, args) -> str | None:
    return refused_array(args[0]) or ffi.unavailable("jaxfuse_global_average_pool")


def _run(config: GlobalAveragePoolConfig, args, mesh_axes):
    (x,) = args
    shape = (*x.shape[: config.batch_rank], x.shape[-1])
    return (ffi.call("jaxfuse_global_average_pool", jax.ShapeDtypeStruct(shape, jnp.float32), x),)


def _axes(config: GlobalAveragePoolConfig | Linear, ranks) -> BatchAxes:
    return BatchAxes((0,), (0,))


OP = FusedOp(
    "global_average_pool",
    reference=_reference,
    residuals=lambda config, args, outs: (),
    tangent=_tangent,
    for_autodiff=lambda config: config,
    forward_kernels=(Kernel(None, _refuse, _run),),
    backward_kernels=(),
    forward_axes=_axes,
    backward_axes=_axes,
)
