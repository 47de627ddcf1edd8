"""Which activation a function is, by what it computes: its values and derivatives on the points of program/elementwise.py."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfuse.ops.activations import ALIASES, NO_ACTIVATION, PRESETS, TABLE, Activation, named
from jaxfuse.ops.errors import Arguments
from jaxfuse.ops.piecewise import RELU, Evaluate, PiecewiseLinear, fitted
from jaxfuse.program.elementwise import FAR, FINITE, POINTS, same, same_limits, table_of

ActivationArgument = str | Callable[[Any], Any] | None  # of an op

_FLOAT32 = np.dtype(np.float32)
_LIKE = jax.ShapeDtypeStruct((2,), _FLOAT32)


@functools.cache
def known_table(activation: Activation, dtype: np.dtype = _FLOAT32) -> np.ndarray:
    """On POINTS, with the activation's constants rounded to the dtype."""
    return table_at(activation, POINTS, dtype)


def table_at(activation: Activation, points: np.ndarray, dtype: np.dtype = _FLOAT32) -> np.ndarray:
    """[2, points]: its values and derivatives."""
    table = table_of(activation.value, jax.ShapeDtypeStruct((2,), dtype), points)
    assert table is not None, f"{activation} cannot be interpreted"
    return table


@functools.cache
def tolerance(activation: Activation, dtype: np.dtype) -> float:
    """How far a spelling of the activation may be off: twice what rounding its constants to the dtype does, of which gelu and selu have
    some."""
    if dtype.itemsize >= 4:
        return 2e-5
    exact, rounded = (known_table(activation, of)[:, : len(FINITE)] for of in (_FLOAT32, dtype))
    return 2e-5 + 2 * float((np.abs(rounded - exact) / (1 + np.abs(exact))).max())


def candidates(table: np.ndarray):
    """The activations of the table with a parameter read off this table: a slope, a depth."""
    at = dict(zip(FINITE, table[0]))
    for name, known in TABLE.items():
        alpha = float(np.float32(known.alpha.read(at))) if known.alpha else 0.0
        if name != "none" and (not known.alpha or 0 < alpha < known.alpha.below):
            yield named(name, alpha)


def identified(table: np.ndarray, evaluate: Evaluate, dtype: np.dtype) -> Activation | None:
    """The activation with the same values, the same derivatives (ties included) and the same NaN and infinities, but for what constants
    lose in the dtype."""
    n = len(FINITE)
    points, finite = POINTS[:n], table[:, :n]
    if function := fitted(points, finite, evaluate):
        return _canonical("piecewise_linear", function)
    smooth = [(np.abs(finite - known_table(a)[:, :n]).max(), a) for a in candidates(table)
              if not isinstance(a.parameter, PiecewiseLinear) and a.kind != "relu" and same(table, known_table(a), tolerance(a, dtype))]
    if smooth:
        return min(smooth, key=lambda fit: fit[0])[1]  # the first of equals: elu(1) is celu(1) too
    gate = fitted(points[points != 0], *_gate(points, finite, evaluate))
    return _canonical("piecewise_gate", gate) if gate and _is_gate(gate, table) else None


def of_function(function: Callable) -> Activation | None:
    """Of a function of one array, as jax.nn and users write them."""
    def evaluate(points):
        return table_of(function, _LIKE, points)

    table = evaluate(POINTS)
    return None if table is None else identified(table, evaluate, _FLOAT32)


def activation_of(arguments: Arguments, activation: ActivationArgument, alpha: float = 0.0) -> Activation:
    """The argument `activation` of an op, checked: a name, or a function that is one of those with names."""
    alpha = arguments.number("alpha", alpha)
    if activation is None:
        return NO_ACTIVATION
    if not callable(activation) or isinstance(activation, type):
        name = arguments.one_of("activation", activation, TABLE, ALIASES)
        parameter = TABLE[name].alpha
        divided = alpha == 0 and parameter is not None and parameter.divides
        arguments.check(not divided, "alpha", alpha, f"another number than 0, by which {name} divides",
                        "or pass a function, such as jax.nn.celu")
        return named(name, alpha)
    try:
        found = of_function(activation)
    except (TypeError, ValueError):  # it takes other arguments than one array
        found = None
    arguments.check(found is not None, "activation", repr(activation), "a function that is an activation of the table",
                    "apply it to what the op returns")
    assert found is not None
    return found


def _gate(points, finite, evaluate: Evaluate) -> tuple[np.ndarray, Evaluate]:
    """The table and the values of f where this is x·f(x)."""

    def divided(x, table):
        with np.errstate(all="ignore"):
            value = table[0] / x
            return np.stack([value, (table[1] - value) / x])

    def of_gate(x):
        beside = np.where(x == 0, np.copysign(1e-30, x), np.clip(x, -1e30, 1e30))
        return np.where(np.isnan(x), [[np.nan], [0.0]], divided(beside, evaluate(beside)))

    return divided(points[points != 0], finite[:, points != 0]), of_gate


def _is_gate(gate: PiecewiseLinear, table: np.ndarray) -> bool:
    """Of the kind that hard_swish has: x·clip(...)."""
    with np.errstate(invalid="ignore"):
        values = POINTS * gate.evaluated(POINTS)
    return gate.slopes[0] == gate.slopes[2] == 0 and np.allclose(values, table[0], rtol=1e-9, atol=1e-9, equal_nan=True)


def _canonical(kind: str, function: PiecewiseLinear) -> Activation:
    """One of those with names, if it is that but for the rounding of its numbers."""
    numbers = function.numbers().astype(np.float32)
    for known in PRESETS:
        if known.kind == kind and isinstance(known.parameter, PiecewiseLinear):
            other = known.parameter.numbers().astype(np.float32)
            if np.allclose(numbers, other, rtol=1e-6, atol=0, equal_nan=True) and np.array_equal(np.signbit(numbers), np.signbit(other)):
                return known
    return named("relu") if (kind, function) == ("piecewise_linear", RELU) else Activation(kind, function)


def nearest(table: np.ndarray) -> tuple[str, str]:
    """(the name of one that this is close to, where it differs); empty if it resembles none."""
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
        return name, where
    return "", ""


def _beyond(table: np.ndarray, known: np.ndarray) -> str:
    """How they differ on the points SPECIAL."""
    if np.allclose(table[0], known[0], rtol=1e-3, atol=1e-3, equal_nan=True):
        return f"where exp overflows its derivative is {table[1, 0]:g} at {FAR:g} and {table[1, 1]:g} at {-FAR:g}, not {known[1, :2]}"
    if not np.allclose(table[0, 2:], known[0, 2:], rtol=1e-3, atol=1e-3, equal_nan=True):
        return f"at infinity, -infinity and NaN it is {table[0, 2:]}, not {known[0, 2:]}"
    return f"where exp overflows it is {table[0, 0]:g} at {FAR:g} and {table[0, 1]:g} at {-FAR:g}, not {known[0, :2]}"
