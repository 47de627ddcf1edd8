"""Piecewise linear functions of up to three pieces: relu, leaky relu, every clip, hard tanh, hard sigmoid, soft shrink.

    y = slope·(x - center) + offset,    a slope and an offset each below the lower bound, between the bounds, and above

What JAX computes depends on the spelling only at single points, so those are parameters too: the derivative at each
bound, the sign of a zero there, and value and derivative at NaN. The kernels have the same (xla_ext/activation.h).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

NONE = -0.0  # as an offset: what changes no sum, that of -0 included


@dataclasses.dataclass(frozen=True, eq=False)
class PiecewiseLinear:
    """A bound of ±infinity leaves out the piece beyond it. A slope of 0 gives the offset, of an infinite x too.

    at_bounds: the derivative there. inward: whether the value at a bound is the middle piece's, which decides on the sign
    of a zero. at_nan: value and derivative. Two are equal if all their bits are: 0 is not -0, and NaN is NaN.
    """

    bounds: tuple[float, float]
    slopes: tuple[float, float, float]
    offsets: tuple[float, float, float]
    at_bounds: tuple[float, float]
    inward: tuple[bool, bool] = (False, False)
    at_nan: tuple[float, float] = (math.nan, 0.0)
    center: float = 0.0

    def numbers(self) -> np.ndarray:
        """In the order of the kernels' parameters."""
        return np.array([self.center, *self.bounds, *self.slopes, *self.offsets, *self.at_bounds, *self.inward, *self.at_nan])

    def __eq__(self, other):
        return isinstance(other, PiecewiseLinear) and self.numbers().tobytes() == other.numbers().tobytes()

    def __hash__(self):
        return hash(self.numbers().tobytes())

    @property
    def ends(self) -> tuple[float, float]:
        """The values at the bounds."""
        return self._end(0, 0), self._end(1, 2)

    def _end(self, bound: int, outer: int) -> float:
        if math.isfinite(self.bounds[bound]) and self.slopes[outer] == 0:
            return self.offsets[outer]
        return self.slopes[1] * (self.bounds[bound] - self.center) + self.offsets[1]

    @property
    def derivative_from_y(self) -> bool:
        """Whether the value determines the derivative: x beyond a bound must not give what x at it does, if that counts, and
        the value at a bound must be the same in every dtype that the value may be rounded to."""
        lower, middle, upper = self.slopes
        rises = lower >= 0 and middle > 0 and upper >= 0
        ties = (lower > 0 or self.at_bounds[0] == lower) and (upper > 0 or self.at_bounds[1] == upper)
        rounds = any(float(np.asarray(v).astype(dtype)) != v for v in self.ends for dtype in (np.float16, jnp.bfloat16))
        return rises and ties and not rounds and self._nan_is_told()

    def _nan_is_told(self) -> bool:
        value, slope = self.at_nan
        return math.isnan(value) or float(self.derivative(np.asarray(value), self.ends)) == slope

    @property
    def is_mask(self) -> bool:
        """Whether a bit tells the derivative."""
        return {*self.slopes, *self.at_bounds, self.at_nan[1]} <= {0.0, 1.0}

    def derivative(self, x: np.ndarray, bounds=None) -> np.ndarray:
        """By numpy, in float64."""
        (low, high), (lower, middle, upper) = bounds or self.bounds, self.slopes
        return np.select([x < low, x > high, x == low, x == high, x == x], [lower, upper, *self.at_bounds, middle], self.at_nan[1])

    def evaluated(self, x: np.ndarray) -> np.ndarray:
        """The value, by numpy, in float64."""
        below, above = ((x < self.bounds[0]) | (x == self.bounds[0]) & (not self.inward[0]),
                        (x > self.bounds[1]) | (x == self.bounds[1]) & (not self.inward[1]))
        lower, middle, upper = (slope * (x - self.center) + offset if slope else np.full(np.shape(x), offset)
                                for slope, offset in zip(self.slopes, self.offsets))
        return np.select([below, above, x == x], [lower, upper, middle], self.at_nan[0])

    def value(self, x):
        """By JAX, with the derivative that is meant in both modes, of every order."""
        return _value(self, x)

    def times_derivative(self, x, g, bounds=None):
        """g · value'(x), selected: 0·g would be NaN for an infinite g. With `ends` as bounds, of y in place of x."""
        (low, high), (lower, middle, upper) = bounds or self.bounds, self.slopes
        at_low, at_high = self.at_bounds

        def scaled(slope):
            return jnp.zeros_like(g) if slope == 0 else g if slope == 1 else g * slope

        out = scaled(middle)
        if math.isfinite(low):
            out = jnp.where(x <= low if at_low == lower else x < low, scaled(lower), out)
            out = out if at_low in (lower, middle) else jnp.where(x == low, scaled(at_low), out)
        if math.isfinite(high):
            out = jnp.where(x >= high if at_high == upper else x > high, scaled(upper), out)
            out = out if at_high in (upper, middle) else jnp.where(x == high, scaled(at_high), out)
        return out if self.at_nan[1] == middle else jnp.where(x != x, scaled(self.at_nan[1]), out)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _value(function: PiecewiseLinear, x):
    low, high = function.bounds
    lower, middle, upper = (slope * (x - function.center) + offset if slope else jnp.full_like(x, offset)
                            for slope, offset in zip(function.slopes, function.offsets))
    y = middle
    if math.isfinite(low):
        y = jnp.where(x < low if function.inward[0] else x <= low, lower, y)
    if math.isfinite(high):
        y = jnp.where(x > high if function.inward[1] else x >= high, upper, y)
    nan = function.at_nan[0]
    return y if math.isnan(nan) and function.slopes[1] else jnp.where(x != x, nan, y)


@_value.defjvp
def _(function, primals, tangents):
    return function.value(*primals), function.times_derivative(*primals, *tangents)


# --- those with names --------------------------------------------------------------------------------------------


def two_pieces(slope: float, at_0: float, at_nan: float) -> PiecewiseLinear:
    """slope·x below 0 and x above; with a derivative at 0, and at NaN."""
    return PiecewiseLinear((0.0, math.inf), (slope, 1.0, 1.0), (NONE if slope else 0.0, NONE, NONE), (at_0, 1.0), at_nan=(math.nan, at_nan))


def clip(low: float, high: float, at_bounds: float, at_nan: float = 0.0) -> PiecewiseLinear:
    """min(max(x, low), high); with a derivative at both, and at NaN."""
    return PiecewiseLinear((low, high), (0.0, 1.0, 0.0), (low, NONE, high), (at_bounds, at_bounds), at_nan=(math.nan, at_nan))


RELU = two_pieces(0.0, 0.0, 0.0)  # as which it is recognised; it has a kind of its own, for speed

# As jax.nn has it, relu6(x + 3)/6: 0 at the ties, where a clip's derivative is half of that between them.
HARD_SIGMOID = PiecewiseLinear((-3.0, 3.0), (0.0, 1 / 6, 0.0), (0.0, NONE, 1.0), (0.0, 0.0), center=-3.0)


# --- Which one a function is -------------------------------------------------------------------------------------

Evaluate = Callable[[np.ndarray], np.ndarray]  # points -> values and derivatives at them, in float64


def fitted(points: np.ndarray, table: np.ndarray, evaluate: Evaluate) -> PiecewiseLinear | None:
    """The continuous function of two or three pieces that has these values at these points, and at its bounds, at ±0, at
    infinity and at NaN what `evaluate` says. None: there is none, or it is a scaled or moved one of them."""
    lines = _lines(points, *table)
    if lines is None or not _is_basic(lines):
        return None
    if len(lines) == 2:  # the one that is the identity is the middle
        lines = [*lines, lines[1]] if lines[1] == (1.0, 0.0) else [lines[0], *lines]
    low, high = (_crossing(lines[i], lines[i + 1], end) for i, end in ((0, -math.inf), (1, math.inf)))
    if low is None or high is None or not low < high:
        return None
    (lower, _), (middle, shift), (upper, _) = lines
    center = _snapped(-shift / middle) if middle else 0.0
    special = evaluate(np.array([math.nan, -40.0, 0.0, 40.0]))
    offsets = [_snapped(offset + slope * center) or NONE for slope, offset in lines]
    for i, line in enumerate(lines):
        if line == (0.0, 0.0):  # with the sign of the program's zero
            offsets[i] = math.copysign(0.0, special[0, 1 + i])
    at_bounds = _tie(evaluate, low, (lower, middle)), _tie(evaluate, high, (middle, upper))
    at_nan = tuple(math.nan if math.isnan(v) else float(v) for v in special[:, 0])
    plain = PiecewiseLinear((low, high), (lower, middle, upper), (offsets[0], offsets[1], offsets[2]), at_bounds,
                            at_nan=(at_nan[0], at_nan[1]), center=center)
    probes = np.array([0.0, -0.0, math.inf, -math.inf, *filter(math.isfinite, (low, high))])
    truth = evaluate(probes)[0]
    for inward in ((False, False), (True, False), (False, True), (True, True)):
        function = dataclasses.replace(plain, inward=inward)
        with np.errstate(invalid="ignore"):
            value = function.evaluated(probes)
        same_signs = np.signbit(value[:2]) == np.signbit(truth[:2])
        zeros = np.array_equal(value[:4] == 0, truth[:4] == 0)
        if zeros and np.allclose(value, truth, rtol=1e-9, atol=1e-9) and np.all(same_signs | (truth[:2] != 0)):
            return function
    return None


Line = tuple[float, float]  # slope, offset


def _lines(x, y, slopes) -> list[Line] | None:
    """The lines on which the points lie, from left to right."""
    order = np.argsort(x)
    x, y, slopes = x[order], y[order], slopes[order]
    if not np.isfinite(y).all() or not np.isfinite(slopes).all():
        return None

    def line(i) -> Line:
        slope = _snapped(slopes[i])
        return slope, _snapped(y[i] - slope * x[i])

    def fits(line: Line):
        return np.abs(line[0] * x + line[1] - y) <= 1e-9 * (1 + np.abs(y))

    first, last = line(0), line(len(x) - 1)
    rest = np.flatnonzero(~(fits(first) | fits(last)))
    if first == last:
        return None  # straight, or back on the same line: abs(x) beyond a dent
    if not len(rest):
        return [first, last] if _in_order(x, [first, last], fits) else None
    middle = line(rest[len(rest) // 2])
    lines = [first, middle, last]
    return lines if fits(middle)[rest].all() and _in_order(x, lines, fits) else None


def _in_order(x, lines: list[Line], fits) -> bool:
    """Whether each line holds from where it crosses the one before to where it crosses the next."""
    crossings = [_crossing(a, b, math.nan) for a, b in zip(lines, lines[1:])]
    if None in crossings:
        return False
    edges = [-math.inf, *crossings, math.inf]
    return all(fits(line)[(x > low) & (x < high)].all() for line, low, high in zip(lines, edges, edges[1:]))


def _crossing(a: Line, b: Line, same: float) -> float | None:
    """Where two lines meet; `same` if they are one, None if they are parallel."""
    if a[0] == b[0]:
        return same if a[1] == b[1] else None
    return _snapped((a[1] - b[1]) / (b[0] - a[0]))


def _snapped(number: float) -> float:
    """Without what arithmetic in float64 added to a number of float32."""
    with np.errstate(over="ignore"):  # the slope of what overflows far out
        near = float(np.float32(number)) if abs(number) > 1e-11 else 0.0
    return (near if abs(near - number) <= 1e-11 * max(1.0, abs(number)) else float(number)) + 0.0  # not -0


def _tie(evaluate: Evaluate, bound: float, slopes: tuple[float, float]) -> float:
    """The derivative at a bound: what is neither side's, where rounding has the bound beside it."""
    nearby = np.array([bound, np.nextafter(bound, -math.inf), np.nextafter(bound, math.inf)])
    found = evaluate(nearby)[1]
    other = [v for v in found if not np.isclose(v, slopes).any() and math.isfinite(v)]
    at_bound = other[0] if other else found[0] if math.isfinite(found[0]) else slopes[0 if bound > 0 else 1]
    return next((s for s in slopes if np.isclose(at_bound, s)), _snapped(at_bound))


def _is_basic(lines: list[Line]) -> bool:
    """A relu times 2 is left to be a relu and a product: the relu's kernels are better, and its gradient is known."""
    slopes = [slope for slope, _ in lines]
    return (1.0, 0.0) in lines or len(lines) == 3 and (slopes[0] == slopes[2] == 0 or slopes == [1, 0, 1])
