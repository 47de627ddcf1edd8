"""What runs a fused site, as reports name it: asked of the site's own program, and of the native module, for each call in it."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxfuse.ops.stage import STAGES, Stage
from jaxfuse.program.graph import Emission
from jaxfuse.runtime import ffi, platforms
from jaxfuse.runtime.settings import ours

PLAIN_JAX, UNKNOWN = "plain JAX", "unknown"


@ours
def kernels(emissions: Iterable[Emission]) -> str:
    """Like "native", or "native+onednn" where calls are, or a call is, computed by both. Sums and what follows them do not count
    where there are products: those are oneDNN's or our own. "unknown" where the site cannot be traced by itself: no program fails
    for its report."""
    try:
        found = {name for emission in emissions for call in _calls(_program(emission)) for name in _names(*call)}
    except Exception:
        return UNKNOWN
    return "+".join(sorted(found)) or PLAIN_JAX


def _program(emission: Emission) -> Jaxpr:
    """As on one device: what shardings would add to it are no calls."""
    def run(*arrays):
        given = dict(zip(emission.needs, arrays))
        return [array for _, array in emission.run(lambda value: value.literal if value.literal is not None else given[value])]

    return jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(value.shape, value.dtype) for value in emission.needs]).jaxpr


def _calls(program: Jaxpr) -> Iterator[tuple]:
    """(stage, config, types) of every fused operation in it, loops and branches included."""
    for equation in program.eqns:
        if stage := STAGES.get(equation.primitive):
            yield stage, equation.params["config"], [_type(v.aval) for v in equation.invars]
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, (Jaxpr, ClosedJaxpr)):
                    yield from _calls(getattr(inner, "jaxpr", inner))


def _type(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _names(stage: Stage, config, types) -> set[str]:
    kernel, _ = stage.kernel(config, types, platforms.current())
    if kernel is None or kernel.run is None:
        return {PLAIN_JAX}
    run = kernel.run
    return {kernel.name} if kernel.name else ffi.libraries(lambda *arrays: run(config, arrays, ()), *types)
