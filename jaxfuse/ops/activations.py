"""The activations that fused ops know: what they compute, their derivatives, and the names under which ops take them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.ops.piecewise import NONE, PiecewiseLinear


class Kind(NamedTuple):
    """value(x, parameter): the function. pullback(y, g, parameter): g · value'(x) from the *output* y, where that determines
    it. It selects where JAX's own derivative does: 0 · g would be NaN for an infinite g."""

    value: Callable
    pullback: Callable | None = None


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772

# What kernels know (xla_ext/activation.h). The parameter is a number, a PiecewiseLinear or None.
KINDS: dict[str, Kind] = {
    "none": Kind(lambda x, _: x, lambda y, g, _: g),
    "relu": Kind(lambda x, _: jax.nn.relu(x), lambda y, g, _: jnp.where(y > 0, g, 0)),
    "piecewise_linear": Kind(lambda x, f: f.value(x), lambda y, g, f: f.times_derivative(y, g, f.ends)),
    "piecewise_gate": Kind(lambda x, f: x * f.value(x)),
    "elu": Kind(lambda x, alpha: jax.nn.elu(x, alpha), lambda y, g, alpha: g * jnp.where(y > 0, 1, y + alpha)),
    "selu": Kind(lambda x, _: jax.nn.selu(x),
                 lambda y, g, _: g * jnp.where(y > 0, _SELU_SCALE, y + _SELU_SCALE * _SELU_ALPHA)),
    "celu": Kind(lambda x, alpha: jax.nn.celu(x, alpha), lambda y, g, alpha: g * jnp.where(y > 0, 1, y / alpha + 1)),
    "sigmoid": Kind(lambda x, _: jax.nn.sigmoid(x), lambda y, g, _: g * (y * (1 - y))),
    "tanh": Kind(lambda x, _: jnp.tanh(x), lambda y, g, _: g * (1 - y * y)),
    "silu": Kind(lambda x, _: jax.nn.silu(x)),
    "gelu": Kind(lambda x, _: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": Kind(lambda x, _: jax.nn.gelu(x, approximate=True)),
    "mish": Kind(lambda x, _: jax.nn.mish(x)),
    "softplus": Kind(lambda x, _: jax.nn.softplus(x), lambda y, g, _: g * -jnp.expm1(-y)),
    "relu_squared": Kind(lambda x, _: jnp.square(jax.nn.relu(x))),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """One function: a kind and its parameter."""

    kind: str
    parameter: float | PiecewiseLinear | None = None

    @property
    def name(self) -> str:
        """Of the table, or of the family."""
        return _name(self)

    @property
    def derivative_from_y(self) -> bool:
        """Whether the value determines the derivative. Else the backward pass needs x: an op keeps it, or computes it again
        from what it keeps."""
        if isinstance(self.parameter, PiecewiseLinear):
            return self.kind == "piecewise_linear" and self.parameter.derivative_from_y
        return KINDS[self.kind].pullback is not None and (self.parameter is None or self.parameter > 0)

    @property
    def has_alpha(self) -> bool:
        return self.parameter is not None and self not in PRESETS

    @property
    def ties(self) -> tuple[float, ...]:
        """Where the pieces of a piecewise one meet."""
        return tuple(filter(math.isfinite, self.parameter.bounds)) if isinstance(self.parameter, PiecewiseLinear) else ()

    @property
    def is_mask(self) -> bool:
        """Whether one bit for each element is the derivative."""
        linear = self.kind == "piecewise_linear" and isinstance(self.parameter, PiecewiseLinear) and self.parameter.is_mask
        return self.kind == "relu" or linear

    def value(self, x):
        return KINDS[self.kind].value(x, self.parameter)

    def pullback(self, y, g):
        """g · value'(x) from y, which must tell it."""
        return KINDS[self.kind].pullback(y, g, self.parameter)

    def jvp(self, x, g):
        """g · value'(x), as forward mode has it."""
        return jax.jvp(self.value, (x,), (g,))[1]

    def cotangent(self, x, g):
        """The same as reverse mode has it: they differ where a product of 0 and infinity is selected away."""
        return jax.vjp(self.value, x)[1](g)[0]

    def attributes(self) -> dict:
        """Of a kernel's call."""
        alone = [] if self.parameter is None else [self.parameter]
        numbers = self.parameter.numbers() if isinstance(self.parameter, PiecewiseLinear) else alone
        return dict(activation=self.kind, parameters=np.asarray(numbers, np.float32))


def _two_pieces(slope: float, at_0: float, at_nan: float) -> PiecewiseLinear:
    return PiecewiseLinear((0.0, math.inf), (slope, 1.0, 1.0), (NONE if slope else 0.0, NONE, NONE), (at_0, 1.0), at_nan=(math.nan, at_nan))


def _clip(low: float, high: float, at_bounds: float, at_nan: float = 0.0) -> PiecewiseLinear:
    return PiecewiseLinear((low, high), (0.0, 1.0, 0.0), (low, NONE, high), (at_bounds, at_bounds), at_nan=(math.nan, at_nan))


RELU = _two_pieces(0.0, 0.0, 0.0)  # as which it is recognised; it has a kind of its own, for speed

# As jax.nn has it, relu6(x + 3)/6: 0 at the ties, where a clip's derivative is half of that between them.
_HARD_SIGMOID = PiecewiseLinear((-3.0, 3.0), (0.0, 1 / 6, 0.0), (0.0, NONE, 1.0), (0.0, 0.0), center=-3.0)


def _piecewise(function: PiecewiseLinear) -> Activation:
    return Activation("piecewise_linear", function)


def _without(kind: str, alpha: float) -> Activation:
    return Activation(kind)


class Named(NamedTuple):
    make: Callable[[float], Activation]
    has_alpha: bool = False


NO_ACTIVATION = Activation("none")

TABLE: dict[str, Named] = {
    # max(x, 0), and min(max(x, 0), 6), as JAX differentiates them: half at the ties, which y cannot tell from beyond
    "maximum0": Named(lambda _: _piecewise(_two_pieces(0.0, 0.5, 0.0))),
    "relu6": Named(lambda _: _piecewise(_clip(0.0, 6.0, 0.0))),
    "clip6": Named(lambda _: _piecewise(_clip(0.0, 6.0, 0.5))),
    "clip": Named(lambda alpha: _piecewise(_clip(0.0, alpha, 0.5)), True),
    # jax.nn.leaky_relu takes x >= 0 as the linear side
    "leaky_relu": Named(lambda alpha: _piecewise(_two_pieces(alpha, 1.0, alpha)), True),
    "hard_tanh": Named(lambda _: _piecewise(_clip(-1.0, 1.0, 1.0, 1.0))),
    "hard_sigmoid": Named(lambda _: _piecewise(_HARD_SIGMOID)),
    "hard_swish": Named(lambda _: Activation("piecewise_gate", _HARD_SIGMOID)),
    **{kind: Named(functools.partial(Activation, kind), True) for kind in ("elu", "celu")},
    **{kind: Named(functools.partial(_without, kind)) for kind in KINDS
       if kind not in ("elu", "celu", "piecewise_linear", "piecewise_gate")},
}

ALIASES = {"linear": "none", "identity": "none", "swish": "silu", "hard_silu": "hard_swish", "hardswish": "hard_swish",
           "hardsigmoid": "hard_sigmoid", "hardtanh": "hard_tanh", "lrelu": "leaky_relu", "leakyrelu": "leaky_relu",
           "relu2": "relu_squared", "squared_relu": "relu_squared", "logistic": "sigmoid", "max": "maximum0"}


@functools.cache
def named(name: str, alpha: float = 0.0) -> Activation:
    """The activation of the table; `alpha` is the parameter of those that have one."""
    return TABLE[name].make(alpha)


PRESETS = {named(name): name for name, known in TABLE.items() if not known.has_alpha}


def _name(activation: Activation) -> str:
    function = activation.parameter
    if activation in PRESETS:
        return PRESETS[activation]
    if activation.kind == "piecewise_gate":
        return "hard_swish"
    if not isinstance(function, PiecewiseLinear):
        return activation.kind
    if function.slopes[::2] == (0.0, 0.0):
        return "clip" if function.slopes[1] == 1 and not function.center else "hard_sigmoid"
    if function.bounds == (0.0, math.inf):
        return "leaky_relu" if function.slopes[0] else "relu"
    return "piecewise_linear"
