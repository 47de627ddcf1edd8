"""What the patterns ask of an op: whether a kernel takes what was found and the policy expects a gain of it; and the gradients that an
op gives, in the places where JAX's own gradient of the same nodes was found."""

from collections.abc import Callable, Iterable, Iterator

import jax

from jaxfuse.analysis.gradients import Gradient
from jaxfuse.ops.batch_axes import reshaped
from jaxfuse.ops.op import type_of
from jaxfuse.patterns.walk import depends_on, require_batch_sharding
from jaxfuse.program.graph import Emission, Value
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


def gradient_emission(gradient: Gradient, needs: tuple[Value, ...], arrays: Callable[[Callable], Iterable]) -> Emission:
    """Of the values found: `arrays(read)` are the gradients that they hold, to which what else they sum is added. Raises `Unfit` where
    they wait for each other."""
    needs = (*needs, gradient.dy, *[v for added in gradient.added for v in added])
    require_batch_sharding(needs)
    if depends_on(needs, gradient.defines):
        raise Unfit("its gradients depend on each other")

    def run(read) -> Iterator[tuple[Value, object]]:
        for value, added, array in zip(gradient.found, gradient.added, arrays(read)):
            if value is not None:
                yield value, reshaped(sum(map(read, added), array).astype(value.dtype), value.shape)

    return Emission(needs, gradient.defines, run)
