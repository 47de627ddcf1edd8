"""Which of the known activations an elementwise region is, decided by what it computes."""

import numpy as np

from jaxfuse.analysis.elementwise import FINITE, same_limits
from jaxfuse.analysis.normal import constant
from jaxfuse.analysis.regions import Region
from jaxfuse.ops.activations import Activation
from jaxfuse.ops.naming import candidates, identified, known_table, table_at, tolerance
from jaxfuse.patterns.walk import WalkEnd
from jaxfuse.program.equations import derivative


def name_activation(region: Region) -> Activation | WalkEnd:
    """The activation with the same values, the same derivatives (ties included) and the same NaN and infinities."""
    table, activation, masks, from_value = _cached(region)
    if table is None:
        return WalkEnd(f"{region.nodes[0]} is not a known activation")
    if activation is None:
        return _near_miss(region, table)
    if region.masks and not np.array_equal(masks, from_value):
        name = activation.name
        return WalkEnd(f"{region.start!r} is compared at {region.masks[0].producer}, which {name}'s value cannot serve", name)
    return activation


def _near_miss(region: Region, table: np.ndarray) -> WalkEnd:
    """Close to one we know, and where it differs; nothing to report if it resembles none."""
    n = len(FINITE)
    for activation in sorted(candidates(table), key=lambda near: np.abs(table[0, :n] - known_table(near)[0, :n]).sum()):
        known, name = known_table(activation), activation.name
        if not np.isclose(table[0, :n], known[0, :n], rtol=0.25, atol=0.05).mean() > 0.9:
            continue
        values, slopes = (~np.isclose(t, k, rtol=1e-3, atol=1e-3) for t, k in zip(table[:, :n], known[:, :n]))
        if activation.has_alpha and values.any():  # a parameter can always be found
            continue
        if values.any():
            at = np.argmax(values)
            where = f"at x = {FINITE[at]:g} it is {table[0, at]:g}, not {known[0, at]:g}"
        elif not same_limits(table, known, 1e-3):
            where = _beyond(table[:, n:], known[:, n:])
        elif slopes.any():
            at = np.argmax(slopes)
            where = f"its derivative at x = {FINITE[at]:g} is {table[1, at]:g}, not {known[1, at]:g}"
        else:
            where = "its constants are rounded differently"
        return WalkEnd(f"{region.nodes[-1]} resembles {name}, but {where}", name)
    return WalkEnd(f"{region.nodes[0]} is not a known activation")


def _beyond(table: np.ndarray, known: np.ndarray) -> str:
    """How they differ on the points SPECIAL."""
    if np.allclose(table[0], known[0], rtol=1e-3, atol=1e-3, equal_nan=True):
        return f"where exp overflows its derivative is {table[1, 0]:g} at 1000 and {table[1, 1]:g} at -1000, not {known[1, :2]}"
    if not np.allclose(table[0, 2:], known[0, 2:], rtol=1e-3, atol=1e-3, equal_nan=True):
        return f"at infinity, -infinity and NaN it is {table[0, 2:]}, not {known[0, 2:]}"
    return f"where exp overflows it is {table[0, 0]:g} at 1000 and {table[0, 1]:g} at -1000, not {known[0, :2]}"


_tables: dict = {}


def _cached(region: Region):
    """(the table, its name, *mask_tables) by what the nodes say, and the derivative rule of a custom_jvp."""
    numbers = {region.start: 0}
    text = []
    for node in region.nodes:
        wiring = [("value", numbers[v]) if v in numbers else constant(v) for v in node.inputs]
        numbers[node.out] = len(numbers)
        text.append((node.primitive, derivative(node.eqn) if node.primitive == "custom_jvp_call" else "", str(wiring),
                     str({k: v for k, v in node.params.items() if k != "jvp_jaxpr_fun"})))
    key = tuple(text), tuple(numbers[mask] for mask in region.masks), region.start.shape, str(region.start.dtype)
    if key not in _tables:
        if len(_tables) > 4096:
            _tables.clear()
        _tables[key] = *_tabled(region), *(region.mask_tables() if region.masks else (None, None))
    return _tables[key]


def _tabled(region: Region) -> tuple[np.ndarray | None, Activation | None]:
    table = region.table()
    if table is None:
        return None, None

    def evaluate(points: np.ndarray) -> np.ndarray:
        found = region.table(points)
        assert found is not None, "what could be interpreted can be on other points"
        return found

    activation = identified(table, evaluate, np.dtype(region.start.dtype))
    return table, activation if activation and _agrees(region, activation) else None


def _agrees(region: Region, activation: Activation) -> bool:
    """Whether they have the same values, and zeros, where something that the region compares changes sides, and between."""
    points = region.between
    values, known = region.values((region.end,), points), table_at(activation, points)[0]
    near = tolerance(activation, np.dtype(region.start.dtype))
    return values is not None and np.array_equal(values[0] == 0, known == 0) and np.allclose(values[0], known, rtol=near, atol=near)
