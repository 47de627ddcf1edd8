"""Which of the known activations an elementwise region is, decided by what it computes."""

import re
from typing import Any, NamedTuple

import numpy as np

from jaxfuse.analysis.normal import constant
from jaxfuse.analysis.regions import Region
from jaxfuse.ops.activations import Activation
from jaxfuse.ops.naming import identified, nearest, table_at, tolerance
from jaxfuse.program.equations import derivative


class WalkEnd(NamedTuple):
    """Why a walk went no further; `unfused` is the step that was not taken, None where nothing was there to take."""

    reason: str
    unfused: str | None = None


def name_activation(region: Region) -> Activation | WalkEnd:
    """The activation with the same values, the same derivatives (ties included) and the same NaN and infinities."""
    table, activation, masks, from_value = _cached(region)
    if activation is None:
        name, where = nearest(table) if table is not None else ("", "")
        node = region.nodes[-1] if name else region.nodes[0]
        return WalkEnd(f"{node} resembles {name}, but {where}" if name else f"{node} is not a known activation", name or None)
    if region.masks and not np.array_equal(masks, from_value):
        name = activation.name
        return WalkEnd(f"{region.start!r} is compared at {region.masks[0].producer}, which {name}'s value cannot serve", name)
    return activation


_tables: dict = {}


def _cached(region: Region):
    """(the table, its name, *mask_tables) by what the nodes say, whatever the shape, and the derivative rule of a custom_jvp."""
    numbers = {region.start: 0}
    text = []
    for node in region.nodes:
        wiring = [("value", numbers[v]) if v in numbers else constant(v) for v in node.inputs]
        numbers[node.out] = len(numbers)
        rule = derivative(node.eqn) if node.primitive == "custom_jvp_call" else ""
        params = str({k: v for k, v in node.params.items() if k != "jvp_jaxpr_fun"})
        text.append((node.primitive, _of_any_shape(rule, region.start.shape), _of_any_shape(params, region.start.shape), str(wiring)))
    key = tuple(text), tuple(numbers[mask] for mask in region.masks), region.start.ndim > 0, str(region.start.dtype)
    found = _tables.get(key)
    if found is None:
        if len(_tables) > 4096:
            _tables.clear()
        found = _tables[key] = *_tabled(region), *(region.mask_tables() if region.masks else (None, None))
    return found


def _of_any_shape(text: Any, shape: tuple) -> Any:
    """The text of an elementwise program without the shape of its arrays, nor the lines that its length was cut into: layers of many
    sizes share a table. What is no text stays."""
    if not isinstance(text, str):
        return text
    if shape:
        of_type, of_parameter = re.escape(f"[{','.join(map(str, shape))}]"), re.escape(str(tuple(shape)))
        text = re.sub(rf"(?<=\w){of_type}|(?<=shape=){of_parameter}|(?<='shape': ){of_parameter}", "[shape]", text)
    return " ".join(text.split())


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
    """Whether they have the same values, and zeros, where something that the region compares changes sides, and between. No table in
    float64 shows where exp overflows in the user's precision: an elu without a guard has to be written as one."""
    others = {n.primitive for n in region.nodes if not (n.primitive in ("exp", "expm1") and n.inputs[0] is region.start)}
    if activation.kind == "elu_expm1" and (region.start.dtype == np.float16 or others - {"gt", "ge", "lt", "le", "select_n", "mul", "sub"}):
        return False
    points = region.between
    values, known = region.values((region.end,), points), table_at(activation, points)[0]
    near = tolerance(activation, np.dtype(region.start.dtype))
    return values is not None and np.array_equal(values[0] == 0, known == 0) and np.allclose(values[0], known, rtol=near, atol=near)
