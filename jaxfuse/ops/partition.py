"""Programs that XLA divides among devices: a stage on every shard of the batch, so that what is sharded along it is not gathered.

XLA asks how while it compiles. No device and no mesh needs to be known before: a program may have several meshes, or abstract
ones, and how a value is divided tells enough of the mesh that it was divided over.
"""

import math
import string
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxfuse.ops.batch_axes import BatchAxes


def sharded(run: Callable, axes: BatchAxes, args, out_ranks, devices: Sequence[jax.Device]) -> tuple:
    """`run(shards, mesh_axes)` on every shard of the batch, with the mesh axes over which it is sharded; `devices` are as many as
    the program runs on."""

    def shardings(arg_shapes):
        """The mesh, its axes of the batch, and the (input, output) shardings that go with them."""
        along_batch = [(s, ax) for s, ax in zip(arg_shapes, axes.inputs) if ax is not None]
        known = (_mesh_of(_parts(s.sharding, len(s.shape), ax), devices) for s, ax in along_batch if s.sharding is not None)
        mesh, names = next((found for found in known if found and found[1]), (Mesh(np.array(devices), ("all",)), ()))
        first, ax = along_batch[0]
        if first.shape[ax] % math.prod(mesh.shape[name] for name in names):
            names = ()  # shards would be padded, and the padding counted as data

        def along(ax):
            return NamedSharding(mesh, PartitionSpec(*([None] * ax + [names]) if ax is not None and names else ()))

        return mesh, names, tuple(map(along, axes.inputs)), tuple(map(along, axes.outputs))

    def partition(mesh, arg_shapes, result_shape):
        mesh, names, in_shardings, out_shardings = shardings(arg_shapes)
        return mesh, lambda *shards: _on_a_shard(lambda *own: list(run(own, names)), *shards), list(out_shardings), in_shardings

    def infer(mesh, arg_shapes, result_shape):
        return list(shardings(arg_shapes)[3])

    call = custom_partitioning(lambda *args: list(run(args)))
    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,
        sharding_rule=_sharding_rule(axes, [jnp.ndim(a) for a in args], out_ranks),
    )
    return tuple(call(*args))


def _on_a_shard(fn: Callable, *shards):
    """fn(*shards) under a mesh of automatic axes. Of explicit ones JAX would annotate what a shard computes, and XLA, which has divided
    the program by then, knows neither such an annotation nor an all-reduce whose addition has one."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return fn(*shards)
    automatic = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    with jax.sharding.use_abstract_mesh(automatic):
        return fn(*jax.sharding.reshard(shards, PartitionSpec()))


def _parts(sharding: jax.sharding.Sharding, rank: int, axis: int) -> list[int]:
    """Which part of that axis each device has, by the devices' order."""
    divisible = (sharding.num_devices,) * rank  # by whatever it is divided into
    part = sharding.shard_shape(divisible)[axis]
    return [(index[axis].start or 0) // part for index in sharding.devices_indices_map(divisible).values()]


def _mesh_of(parts: list[int], devices) -> tuple[Mesh, tuple[str, ...]] | None:
    """A mesh over which the batch is divided in this way, and the names of its axes that divide it, the major one first.

    Which part a device has is a sum over the mesh's axes, of place times weight: 0 for an axis along which it is the same. None
    where it is not: no mesh divides an array so.
    """
    sizes: list[int] = []  # of the axes, the minor one first
    weights: list[int] = []
    inner, n = 1, len(parts)
    while inner < n:
        weight, size = parts[inner], 2
        while size * inner < n and parts[size * inner] == size * weight:
            size += 1
        sizes, weights, inner = [*sizes, size], [*weights, weight], inner * size
    places = np.unravel_index(np.arange(n), sizes, "F") if sizes else []
    if inner != n or any(np.array(parts) != sum(w * place for w, place in zip(weights, places))):
        return None
    names = [f"axis{i}" for i in range(len(sizes))]
    dividing = sorted((i for i, w in enumerate(weights) if w), key=lambda i: -weights[i])
    return Mesh(np.array(devices).reshape(sizes[::-1]), names[::-1]), tuple(names[i] for i in dividing)


def _sharding_rule(axes: BatchAxes, in_ranks, out_ranks) -> str:
    """Shardy rule in einsum form: one factor `n` for the batch, a factor of its own for every other dimension."""
    fresh = (f"{letter}{number}" for number in range(99) for letter in string.ascii_lowercase if letter != "n")

    def dims(ranks, batch):
        return ", ".join(
            " ".join("n" if i == ax else next(fresh) for i in range(rank)) for rank, ax in zip(ranks, batch)
        )

    return f"{dims(in_ranks, axes.inputs)} -> {dims(out_ranks, axes.outputs)}"
