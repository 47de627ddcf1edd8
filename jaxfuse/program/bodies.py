"""The programs that a node holds, such as the body of a loop, and what it takes to put others in their place."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxfuse.program.equations import CONTROL, INLINED
from jaxfuse.program.graph import Node, Value


def subprograms(node: Node) -> dict[str, object]:
    """The programs of a node that run as part of this one: loops, branches, remat, shards."""
    return programs(node) if node.primitive in (*CONTROL, *INLINED) else {}


def programs(node: Node) -> dict[str, object]:
    """Parameters of a node that hold programs."""
    return {
        name: value
        for name, value in node.params.items()
        if isinstance(value, (ClosedJaxpr, Jaxpr))
        or isinstance(value, tuple) and value and all(isinstance(v, ClosedJaxpr) for v in value)
    }


def inside(node: Node, work: Callable[[], object]):
    """The result of `work`, done where a program of the node's would be traced: a shard_map has named axes."""
    if node.primitive != "shard_map":
        return work()
    params, results = node.params, []
    names = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]

    def shard():
        results.append(work())

    jax.eval_shape(jax.shard_map(shard, mesh=params["mesh"], in_specs=(), out_specs=None, axis_names=names,
                                 check_vma=params["check_vma"]))
    return results[0]


def retraced(body: ClosedJaxpr | Jaxpr, function) -> ClosedJaxpr | Jaxpr:
    """`function` as a program to stand where `body` stood. Raises TypeError if it returns other types than the body."""
    before = body.jaxpr if isinstance(body, ClosedJaxpr) else body
    after = jax.make_jaxpr(function)(*[v.aval for v in before.invars])
    was, now = ([v.aval for v in jaxpr.outvars] for jaxpr in (before, after.jaxpr))
    if was != now:
        raise TypeError(f"the rewritten body returns {now}, not {was}")
    return after if isinstance(body, ClosedJaxpr) else after.jaxpr


def filled(value: Value, number):
    """The number in the value's shape and type, sharded along explicit axes of a mesh and varying over those of a `shard_map`."""
    sharding = value.aval.sharding if any(value.spec) else None
    varying = tuple(value.aval.manual_axis_type.varying)
    full = jax.lax.broadcast_in_dim(jnp.asarray(number, value.dtype), value.shape, (), out_sharding=sharding)
    return jax.lax.pcast(full, varying, to="varying") if varying else full
