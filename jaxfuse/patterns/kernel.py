"""Whether a kernel takes what a pattern has found, and whether the policy expects a gain of it."""

import jax

from jaxfuse.ops.op import type_of
from jaxfuse.program.graph import Value
from jaxfuse.program.site import Unfit


def require(stage, config, types, unprofitable, op: str, *rule, cost=lambda kernel: ""):
    """The kernel for a stage of an op with this config and these types. `rule` is what the op's rules are asked: config and types
    of the forward op, and "backward" for its gradient; `cost(kernel)` what the pattern itself knows against it. Raises `Unfit` where
    there is no kernel, or where no gain is expected."""
    kernel, reason = stage.kernel(config, types)
    reason = reason or unprofitable(op, *rule, cost=cost(kernel))
    if reason:
        raise Unfit(reason)
    return kernel


def types_of(*values: Value) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(type_of(v.aval) for v in values)
