"""The batch axis of an op: `vmap` folds into it, meshes shard along it, `shard_map` varies over theirs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


class BatchAxes(NamedTuple):
    """For each input and output the axis along which a stage works item by item; None: that value has no such axis.

    An output without one, where any input has one, is a sum (or another statistic) over the batch.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


def batch_axis(channels: int) -> int:
    """The batch axis of arrays whose channels lie along this axis: the first other one."""
    return 1 if channels == 0 else 0


def completed(found, batch_axes, mesh_axes) -> tuple:
    """What a shard's kernel gives: values without a batch axis are sums over the batch, so over those mesh axes too."""
    return tuple(jax.lax.psum(f, mesh_axes) if mesh_axes and ax is None else f for f, ax in zip(found, batch_axes))


def reshaped(x, shape):
    """x in another shape. Under a mesh of explicit axes JAX asks how that is sharded: along the first axis, as x is."""
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    if not any(spec):
        return x.reshape(shape)
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(spec[0], *[None] * (len(shape) - 1))))


def equally_varying(args):
    """Inside `shard_map`: mark every argument as varying over the same mesh axes (the transpose is the psum)."""
    varying = [jax.typeof(a).manual_axis_type.varying for a in args]
    everywhere = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(everywhere - v), to="varying") if everywhere - v else a for a, v in zip(args, varying)
    ]


def merge(arg, dim, axis, size):
    """Fold the vmapped axis `dim` into the batch axis `axis`; what is not vmapped is repeated along it."""
    if axis is None:
        return arg
    if dim is None:
        arg = jnp.broadcast_to(jnp.expand_dims(arg, axis), (*arg.shape[:axis], size, *arg.shape[axis:]))
    else:
        arg = jnp.moveaxis(arg, dim, axis)
    return arg.reshape(*arg.shape[:axis], size * arg.shape[axis + 1], *arg.shape[axis + 2 :])


def split(out, axis, size):
    return out.reshape(*out.shape[:axis], size, out.shape[axis] // size, *out.shape[axis + 1 :])
