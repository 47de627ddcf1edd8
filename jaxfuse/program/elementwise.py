"""What an elementwise function computes, as a table of numbers: two spellings are the same if their tables agree.

The function and its derivative are traced by JAX, so `custom_jvp` rules and the rule of one half at the ties of `max` are
in the table, and interpreted in float64 on a few hundred points: no compilation, no device, any spelling.
"""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.program.equations import INLINED
from jaxfuse.program.graph import Graph, Node, evaluate
from jaxfuse.runtime.private import name_of, params_of

# Dense where activations bend; the ties 0, ±1, ±3, 6 exactly; far out; then where an exp overflows, and what must survive.
_FAR = np.array([11.0, 15, 20, 28, 40, 60, 85, 120, 170, 250, 400, 700])
FINITE = np.concatenate([np.linspace(-9, 9, 289), [-2.5, 2.5, 5.999, 6.001, -1e-3, 1e-3], -_FAR, _FAR])
FAR = 1e5  # where exp(x/20) overflows too
SPECIAL = np.array([FAR, -FAR, np.inf, -np.inf, np.nan])
POINTS = np.concatenate([FINITE, SPECIAL])
CALLS = ("custom_jvp_call", "custom_vjp_call", *INLINED)
_COMPARING = ("lt", "le", "gt", "ge", "eq", "ne", "max", "min", "clamp", "abs", "sign")  # two operands, or one with 0
_GRID = np.concatenate([-np.geomspace(1e4, 1e-9, 700), np.geomspace(1e-9, 1e4, 700)])

_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _maximum(x, y):
    """0 of 0 and -0, as IEEE 754 and XLA have it and numpy has not always."""
    return np.where((x == 0) & (y == 0), np.add(x, y), np.maximum(x, y))


def _minimum(x, y):
    return -_maximum(np.negative(x), np.negative(y))


def _cast(params, x):
    """In float64 as all else, but without what an integer or a float of 8 bits cannot hold."""
    dtype, x = np.dtype(params["new_dtype"]), np.asarray(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return x if x.dtype == bool else x != 0 if dtype.kind == "b" else np.trunc(x)
    return (x.astype(dtype) if dtype.itemsize == 1 else x).astype(np.float64)


def _bits(params, x):
    """A float32 as the bits of it, or back: JAX 0.12 splits x² so in the derivatives of erf and erfc."""
    to = np.dtype(params["new_dtype"])
    if to == np.uint32:
        return np.asarray(x, np.float32).view(np.uint32)
    if to == np.float32 and np.asarray(x).dtype.kind == "u":
        return np.asarray(x, np.uint32).view(np.float32).astype(np.float64)
    raise KeyError(f"bits of {to}")


# primitives that have no parameters, or none that matter -> numpy function of the operands
_PLAIN: dict[str, Callable] = dict(
    add=np.add, add_any=np.add, sub=np.subtract, mul=np.multiply, div=np.divide, neg=np.negative, abs=np.abs, max=_maximum, min=_minimum,
    exp=np.exp, exp2=np.exp2, expm1=np.expm1, log=np.log, log1p=np.log1p, tanh=np.tanh, erf=_erf, erfc=_erfc,
    logistic=lambda x: 1 / (1 + np.exp(-x)),
    sqrt=np.sqrt, rsqrt=lambda x: 1 / np.sqrt(x), square=np.square, pow=lambda x, y: np.power(x, np.asarray(y, np.float64)),
    eq=np.equal, ne=np.not_equal, lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal, is_finite=np.isfinite,
    sign=lambda x: np.where(x == 0, x, np.sign(x)),
    one_minus_square=lambda x: 1 - x * x,
    polynomial=lambda x, *coefficients: np.polynomial.polynomial.polyval(x, coefficients),
    clamp=lambda low, x, high: _minimum(_maximum(x, low), high),
    select_n=lambda which, *cases: np.select([np.equal(which, i) for i in range(len(cases))], cases),
    broadcast_in_dim=lambda x: x,  # of a number: everything else has one shape
    copy=lambda x: x, stop_gradient=lambda x: x, pvary=lambda x: x,
    **{"and": lambda x, y: (np.bitwise_and if np.asarray(x).dtype.kind == "u" else np.logical_and)(x, y),
       "or": np.logical_or, "not": np.logical_not},
)

# primitive -> numpy function of (params, *operands)
RULES: dict[str, Callable] = {name: lambda params, *xs, function=function: function(*xs) for name, function in _PLAIN.items()} | {
    "integer_pow": lambda params, x: np.power(x, float(params["y"])),
    "bitcast_convert_type": _bits,
    "convert_element_type": _cast,
}


def is_known(node: Node) -> bool:
    """Whether a rule computes what the node does. Of integers floats stand for, quotients and bits are others."""
    whole = jnp.issubdtype(node.out.dtype, jnp.integer)
    return node.primitive in RULES and not (whole and node.primitive in ("div", "and", "or", "not"))


def is_elementwise(node: Node) -> bool:
    """One output, and every element of it computed from the same element of the inputs."""
    return len(node.outputs) == 1 and not node.eqn.effects and _is_elementwise(node.eqn)


def _is_elementwise(eqn) -> bool:
    name = name_of(eqn)
    if name == "broadcast_in_dim":
        return np.ndim(eqn.invars[0].aval) == 0
    if name == "custom_vjp_call":  # the user's own derivative: not ours to replace
        return False
    if name in CALLS:
        return all(map(_is_elementwise, _body(eqn).jaxpr.eqns))
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
    return name in RULES and len(shapes) <= 1


class Traced:
    """A function of one array, of the type `like`, as it is traced and interpreted in float64."""

    def __init__(self, function, like):
        self._graph = Graph(jax.make_jaxpr(function)(like))

    def __call__(self, points: np.ndarray, interpreted=None) -> np.ndarray | None:
        """[outputs, points]: what it gives at each of the points; None if a primitive is unknown."""
        try:
            with np.errstate(all="ignore"):
                values = evaluate(self._graph, [points], {}, interpreted or _interpreted)
        except KeyError:
            return None
        return np.stack([np.broadcast_to(np.asarray(a, np.float64), points.shape) for a in values])

    def between(self) -> np.ndarray:
        """Points between all those at which something that it compares changes sides, and close to each of them on both sides."""
        differences: list[np.ndarray] = []

        def noting(node: Node, values: list) -> list:
            if node.primitive in CALLS:
                return evaluate(Graph(_body(node.eqn)), list(map(_wide, values)), {}, noting)
            operands = list(map(_wide, values))
            if node.primitive in _COMPARING:
                at = 1 if node.primitive == "clamp" else 0
                differences.extend(np.subtract(operands[at], other, dtype=np.float64) for i, other in enumerate(operands) if i != at)
            return _interpreted(node, values)

        self(_GRID, noting)
        turns = _zeros(np.broadcast_to(d, _GRID.shape) for d in differences)
        apart = np.maximum(1e-6 * np.abs(turns), 1e-12)
        return np.concatenate([turns, turns - apart, turns + apart, (turns[1:] + turns[:-1]) / 2])


def _zeros(differences: Iterable[np.ndarray]) -> np.ndarray:
    """Where they are 0 on the grid's lines, as float32 has these numbers and as they are; sorted."""
    found: list[np.ndarray] = []
    for d in differences:
        low, high = d[:-1], d[1:]
        with np.errstate(all="ignore"):
            zeros = _GRID[:-1] + (_GRID[1:] - _GRID[:-1]) * low / (low - high)
        zeros = zeros[(low * high <= 0) & (low != high) & np.isfinite(zeros)]
        found += [zeros, zeros.astype(np.float32).astype(np.float64)]
    return np.unique(np.concatenate(found)) if found else np.zeros(0)


def table_of(function, like, points: np.ndarray = POINTS) -> np.ndarray | None:
    """[2, points]: value and derivative, by default on FINITE then SPECIAL; None if a primitive is unknown, if the argument, of
    the type `like`, is not one of real numbers, or if a derivative rule gives another value than the function. Derivatives far out
    are those of reverse mode: what autodiff makes of where(x > 0, x, expm1(x)) is NaN where exp(x) overflows."""
    if not jnp.issubdtype(like.dtype, jnp.floating):
        return None

    def values_and_slope(x):
        return function(x), *jax.jvp(function, (x,), (jnp.ones_like(x),))

    def reverse_slope(x):
        y, pullback = jax.vjp(function, x)
        return pullback(jnp.ones_like(y))  # the function may round: y's type is its own

    found = Traced(values_and_slope, like)(points)
    if found is None or not np.allclose(found[0], found[1], rtol=1e-9, atol=1e-9, equal_nan=True):
        return None
    table, far = found[1:], np.abs(points) >= FAR
    if far.any():
        reverse = Traced(reverse_slope, like)(points[far])
        table[1, far] = table[1, far] if reverse is None else reverse[0]
    return table


def same(table: np.ndarray, known: np.ndarray, tolerance: float) -> bool:
    """Values and derivatives agree on the finite points, and infinities and NaN come out alike."""
    n = len(FINITE)
    return np.allclose(table[:, :n], known[:, :n], rtol=tolerance, atol=tolerance) and same_limits(table, known, tolerance)


def same_limits(table: np.ndarray, known: np.ndarray, tolerance: float) -> bool:
    """Values agree far out, at infinity, at -infinity and at NaN, and are the same where the known one ends in 0, ±1 or ±x: a logarithm
    that follows shows what was added, and no rounded constant is a factor there. Derivatives far out, where they are not 0: what overflows
    on the way to 0 is not missed."""
    n = len(FINITE)
    far = n + np.flatnonzero(known[1, n : n + 2])
    ends = n + np.flatnonzero(np.isin(known[0, n:], (-FAR, -1, 0, 1, FAR)))
    return (np.allclose(table[0, ends], known[0, ends], rtol=1e-7, atol=0)
            and np.allclose(table[0, n:], known[0, n:], rtol=tolerance, atol=tolerance, equal_nan=True)
            and np.allclose(table[1, far], known[1, far], rtol=tolerance, atol=tolerance, equal_nan=True))


def _body(eqn):
    params = params_of(eqn)
    return params.get("call_jaxpr") or params.get("jaxpr")


def _interpreted(node: Node, values: list) -> list:
    """What the node gives in float64."""
    operands = list(map(_wide, values))
    if node.primitive in CALLS:
        return evaluate(Graph(_body(node.eqn)), operands, {}, _interpreted)
    if node.primitive == "reshard":  # of a tangent, under a mesh
        return operands
    of_bits = node.primitive == "and" and all(np.asarray(v).dtype.kind == "u" for v in operands)
    if not is_known(node) and not of_bits:
        raise KeyError(node.primitive)
    return [RULES[node.primitive](node.params, *operands)]


def _wide(value):
    """Numbers in float64, of floats; as they are masks and bits. The tangent of a comparison is 0."""
    array = np.asarray(value)
    return 0.0 if array.dtype == jax.dtypes.float0 else array if array.dtype.kind in "bu" else array.astype(np.float64)
