"""The batch axis of an op: `vmap` folds into it, meshes shard along it, `shard_map` varies over theirs."""

import math
import string
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec


class BatchAxes(NamedTuple):
    """For each input and output the axis along which a stage works item by item; None: that value has no such axis.

    An output without one, where any input has one, is a sum (or another statistic) over the batch.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


def sharded(run: Callable, axes: BatchAxes, args, out_ranks) -> tuple:
    """`run(shards, mesh_axes)` on every shard of the batch, with the mesh axes over which it is sharded."""

    def shardings(mesh, arg_shapes):
        """Mesh axes of the batch, and the (input, output) shardings that go with them."""
        along_batch = [(s, ax) for s, ax in zip(arg_shapes, axes.inputs) if ax is not None]
        names = next(filter(None, (_mesh_axes(s.sharding, ax) for s, ax in along_batch)), ())
        if along_batch[0][0].shape[along_batch[0][1]] % math.prod(mesh.shape[name] for name in names):
            names = ()  # shards would be padded, and the padding counted as data

        def along(ax):
            return NamedSharding(mesh, PartitionSpec(*([None] * ax + [names]) if ax is not None and names else ()))

        return names, tuple(map(along, axes.inputs)), tuple(map(along, axes.outputs))

    def partition(mesh, arg_shapes, result_shape):
        names, in_shardings, out_shardings = shardings(mesh, arg_shapes)
        return mesh, lambda *shards: list(run(shards, names)), list(out_shardings), in_shardings

    def infer(mesh, arg_shapes, result_shape):
        return list(shardings(mesh, arg_shapes)[2])

    call = custom_partitioning(lambda *args: list(run(args)))
    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_sharding_rule(axes, [jnp.ndim(a) for a in args], out_ranks),
    )
    return tuple(call(*args))


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


def _mesh_axes(sharding, axis: int) -> tuple[str, ...]:
    """The mesh axes over which dimension `axis` is sharded."""
    spec = tuple(getattr(sharding, "spec", ()))
    names = spec[axis] if axis < len(spec) else None
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


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


def _sharding_rule(axes: BatchAxes, in_ranks, out_ranks) -> str:
    """Shardy rule in einsum form: one factor `n` for the batch, a factor of its own for every other dimension."""
    fresh = (f"{letter}{number}" for number in range(99) for letter in string.ascii_lowercase if letter != "n")

    def dims(ranks, batch):
        return ", ".join(
            " ".join("n" if i == ax else next(fresh) for i in range(rank)) for rank, ax in zip(ranks, batch)
        )

    return f"{dims(in_ranks, axes.inputs)} -> {dims(out_ranks, axes.outputs)}"
