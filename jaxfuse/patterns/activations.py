"""Which of the known activations an elementwise region is, decided by what it computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.canonical import Region, constant, mask_tables, region_table
from jaxfuse.elementwise import FINITE, same, same_limits, table_of
from jaxfuse.graph import Value
from jaxfuse.match import Activated, Stop
from jaxfuse.ops.activations import TABLE

# bf16 programs round the constants of gelu and its like to eight bits
_TOLERANCE = {jnp.dtype(jnp.bfloat16): 1e-2, jnp.dtype(jnp.float16): 2e-3}


def name_activation(region: Region) -> Activated | Stop:
    """The activation with the same values, the same derivatives (ties included) and the same NaN and infinities."""
    table, masks, from_value = _cached_tables(region)
    if table is None:
        return Stop(f"{region.nodes[0]} is not a known activation")
    tolerance = _TOLERANCE.get(jnp.dtype(region.start.dtype), 2e-5)
    candidates = [(name, alpha, known_table(name, alpha)) for name, alpha in _candidates(table)]
    n = len(FINITE)
    fitting = [(np.abs(table[:, :n] - known[:, :n]).max(), name, alpha) for name, alpha, known in candidates
               if same(table, known, tolerance)]
    if fitting:
        _, name, alpha = min(fitting, key=lambda fit: fit[0])  # the first of equals: elu(1) is celu(1) too
        if region.masks and not np.array_equal(masks, from_value):
            return Stop(f"{region.start!r} is compared at {region.masks[0].producer}, which {name}'s value cannot serve", name)
        return Activated(name, alpha)
    return _near_miss(region, table, candidates)


def is_derivative(region: Region, mask: Value, of: Activated) -> bool:
    """Whether the derivative of this activation is 1 where the region's mask is set and 0 elsewhere."""
    _, masks, _ = _cached_tables(region)
    which = next(i for i, known in enumerate(region.masks) if known is mask)
    return np.array_equal(masks[which, : len(FINITE)], known_table(*of)[1, : len(FINITE)])


def _candidates(table):
    """Names with their parameter: a slope, a depth, a height is read off the table."""
    at = dict(zip(FINITE, table[0]))
    parameters = {"leaky_relu": -at[-1.0], "elu": -at[-40.0], "celu": -at[-40.0], "clip": at[40.0]}
    for name, activation in TABLE.items():
        alpha = float(np.float32(parameters.get(name, 0)))
        known = not activation.has_alpha or 0 < alpha < (1 if name == "leaky_relu" else 20)
        if name != "none" and known:
            yield name, alpha


def _near_miss(region, table, candidates) -> Stop:
    """Close to one we know, and where it differs; nothing to report if it resembles none."""
    n = len(FINITE)
    for name, alpha, known in candidates:
        if alpha or not np.isclose(table[0, :n], known[0, :n], rtol=0.25, atol=0.05).mean() > 0.9:
            continue
        values, slopes = (~np.isclose(t, k, rtol=1e-3, atol=1e-3) for t, k in zip(table[:, :n], known[:, :n]))
        if values.any():
            at = np.argmax(values)
            where = f"at x = {FINITE[at]:g} it is {table[0, at]:g}, not {known[0, at]:g}"
        elif not same_limits(table, known, 1e-3):
            where = f"at infinity, -infinity and NaN it is {table[0, n:]}, not {known[0, n:]}"
        elif slopes.any():
            at = np.argmax(slopes)
            where = f"its derivative at x = {FINITE[at]:g} is {table[1, at]:g}, not {known[1, at]:g}"
        else:
            where = "its constants are rounded differently"
        return Stop(f"{region.nodes[-1]} resembles {name}, but {where}", name)
    return Stop(f"{region.nodes[0]} is not a known activation")


@functools.cache
def known_table(name: str, alpha: float) -> np.ndarray:
    return table_of(functools.partial(TABLE[name].value, alpha=alpha), jax.ShapeDtypeStruct((2,), np.float32))


_tables: dict = {}


def _cached_tables(region: Region):
    """(region_table, *mask_tables) by what the nodes say; the derivative rule of a custom_jvp is told by the function that
    made it."""
    numbers = {id(region.start): 0}
    text = []
    for node in region.nodes:
        wiring = [("value", numbers[id(v)]) if id(v) in numbers else constant(v) for v in node.inputs]
        numbers[id(node.out)] = len(numbers)
        text.append((node.primitive, node.source() if node.primitive == "custom_jvp_call" else "", str(wiring),
                     str({k: v for k, v in node.params.items() if k != "jvp_jaxpr_fun"})))
    key = tuple(text), tuple(numbers[id(mask)] for mask in region.masks), region.start.shape, str(region.start.dtype)
    if key not in _tables:
        if len(_tables) > 4096:
            _tables.clear()
        _tables[key] = region_table(region), *(mask_tables(region) if region.masks else (None, None))
    return _tables[key]
