"""The activations that fused ops know: what they compute, their derivatives, and the names under which ops take them."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.ops.piecewise import HARD_SIGMOID, PiecewiseLinear, clip, two_pieces
from jaxfuse.runtime import ffi
from jaxfuse.runtime.cudnn.graph import PointwiseStep


class Both(NamedTuple):
    """One formula in two languages: a function of JAX, and C++ that is compiled for the CPU and for CUDA."""

    jax: Callable
    cxx: str


class Alpha(NamedTuple):
    """A parameter that is one number. `read`: the number, given the function's values at points; `below` which it is one."""

    read: Callable[[Mapping[float, float]], float]
    below: float = 20.0
    divides: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One function, and all that anything needs to know of it.

    C++ is an expression, or statements with a `return`, in the number N, which is Floats or float: in z, what the function is
    applied to, y = value(z), the cotangent g, and the parameters p. xla_ext/activation_math.h has the functions that it may call.
    Every comparison is written so that NaN takes the branch that keeps it. Derivatives select where JAX's do: 0 · g would be NaN
    for an infinite g.
    """

    value: Both  # of (x, parameter) and of z
    pullback: str  # g · value'(z); JAX has its own
    # The same from y: of (y, g, parameter), and of g and y. None: y does not tell it, and z is kept.
    pullback_from_y: Both | None = None
    alpha: Alpha | None = None
    pieces: bool = False  # the parameter is a PiecewiseLinear
    # Appends oneDNN's post-ops to a convolution, of which y is float32 if f32. False: we apply the function ourselves.
    onednn: str = "false"
    # The step of cuDNN's graph, given the parameter. None: it has none.
    cudnn: Callable[[Any], PointwiseStep | None] = lambda _: None

    @property
    def numbers(self) -> int:
        """How many a kernel takes as its parameters."""
        return 15 if self.pieces else int(self.alpha is not None)


def _cudnn_relu(f: PiecewiseLinear) -> PointwiseStep | None:
    """It may have another slope below 0, or an upper bound."""
    (_, high), (lower, middle, upper) = f.bounds, f.slopes
    if not (f.bounds[0] == f.center == f.offsets[0] == 0 and middle == 1 and math.isnan(f.at_nan[0])) or lower < 0:
        return None
    if math.isfinite(high):
        return PointwiseStep("relu", dict(upper=high)) if lower == upper == 0 else None
    return PointwiseStep("relu", dict(slope=lower) if lower else {})


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
_DEPTH = Alpha(lambda at: -at[-40.0])

# The one table of what kernels know. xla_ext/activations.py makes C++ of it, and wants keywords and literal strings.
KINDS: dict[str, Kind] = {
    "none": Kind(
        value=Both(lambda x, _: x, "z"), pullback="g", pullback_from_y=Both(lambda y, g, _: g, "g"), onednn="true"),
    "relu": Kind(
        value=Both(lambda x, _: jax.nn.relu(x), "z <= 0.0f ? N{} : z"),
        pullback="z > 0.0f ? g : N{}",
        pullback_from_y=Both(lambda y, g, _: jnp.where(y > 0, g, 0), "y > 0.0f ? g : N{}"),
        onednn="eltwise(algorithm::eltwise_relu)",
        cudnn=lambda _: PointwiseStep("relu")),
    "piecewise_linear": Kind(
        value=Both(lambda x, f: f.value(x), "piecewise(p.pieces, z)"),
        pullback="piecewise_gradient(p.pieces, p.pieces.bounds, g, z)",
        pullback_from_y=Both(lambda y, g, f: f.times_derivative(y, g, f.ends),
                             "piecewise_gradient(p.pieces, p.pieces.ends, g, y)"),
        pieces=True,
        onednn="append_linear(ops, p.pieces)",
        cudnn=_cudnn_relu),
    "piecewise_gate": Kind(
        value=Both(lambda x, f: x * f.value(x), "z * piecewise(p.pieces, z)"),
        pullback="g * piecewise(p.pieces, z) + piecewise_gradient(p.pieces, p.pieces.bounds, g * z, z)",
        pieces=True,
        onednn="append_gate(ops, p.pieces)"),
    "elu": Kind(
        value=Both(lambda x, alpha: jax.nn.elu(x, alpha), "z < 0.0f ? p.alpha * expm1_of_negative(z) : z"),
        pullback="z > 0.0f ? g : g * (p.alpha * exp(z))",
        pullback_from_y=Both(lambda y, g, alpha: g * jnp.where(y > 0, 1, y + alpha), "y > 0.0f ? g : g * (y + p.alpha)"),
        alpha=_DEPTH,
        onednn="!f32 && eltwise(algorithm::eltwise_elu, p.alpha)",
        cudnn=lambda alpha: PointwiseStep("elu", dict(elu_alpha=alpha))),
    # Without jax.nn.elu's guard: where exp overflows, reverse mode makes NaN of 0 · exp(x), and forward mode selects it away.
    "elu_expm1": Kind(
        value=Both(lambda x, alpha: jnp.where(x > 0, x, alpha * jnp.expm1(x)), "z < 0.0f ? p.alpha * expm1_of_negative(z) : z"),
        pullback="(z > 0.0f ? g : N{}) + (z > 0.0f ? N{} : g * p.alpha) * exp(z)",
        alpha=_DEPTH,
        onednn="!f32 && eltwise(algorithm::eltwise_elu, p.alpha)",
        cudnn=lambda alpha: PointwiseStep("elu", dict(elu_alpha=alpha))),
    "selu": Kind(
        value=Both(lambda x, _: jax.nn.selu(x), "kSeluScale * (z < 0.0f ? kSeluAlpha * expm1_of_negative(z) : z)"),
        pullback="kSeluScale * (z > 0.0f ? g : g * (kSeluAlpha * exp(z)))",
        pullback_from_y=Both(lambda y, g, _: g * jnp.where(y > 0, _SELU_SCALE, y + _SELU_SCALE * _SELU_ALPHA),
                             "y > 0.0f ? kSeluScale * g : g * (y + kSeluScale * kSeluAlpha)"),
        onednn="!f32 && eltwise(algorithm::eltwise_elu, 1.67326324f) && eltwise(algorithm::eltwise_linear, 1.05070099f)"),
    "celu": Kind(
        value=Both(lambda x, alpha: jax.nn.celu(x, alpha), "z < 0.0f ? p.alpha * expm1_of_negative(z / p.alpha) : z"),
        pullback="z > 0.0f ? g : g * exp(z / p.alpha)",
        pullback_from_y=Both(lambda y, g, alpha: g * jnp.where(y > 0, 1, y / alpha + 1),
                             "y > 0.0f ? g : g * (y / p.alpha + 1.0f)"),
        alpha=_DEPTH._replace(divides=True),
        onednn="!f32 && eltwise(algorithm::eltwise_linear, 1 / p.alpha) && eltwise(algorithm::eltwise_elu, 1) &&"
               " eltwise(algorithm::eltwise_linear, p.alpha)"),
    "sigmoid": Kind(
        value=Both(lambda x, _: jax.nn.sigmoid(x), "sigmoid(z)"),
        pullback="const N s = sigmoid(z); return g * (s * (1.0f - s));",
        pullback_from_y=Both(lambda y, g, _: g * (y * (1 - y)), "g * (y * (1.0f - y))"),
        onednn="eltwise(algorithm::eltwise_logistic)",
        cudnn=lambda _: PointwiseStep("sigmoid")),
    "tanh": Kind(
        value=Both(lambda x, _: jnp.tanh(x), "tanh(z)"),
        pullback="const N t = tanh(z); return g * (1.0f - t * t);",
        pullback_from_y=Both(lambda y, g, _: g * (1 - y * y), "g * (1.0f - y * y)"),
        onednn="eltwise(algorithm::eltwise_tanh)",
        cudnn=lambda _: PointwiseStep("tanh")),
    "silu": Kind(
        value=Both(lambda x, _: jax.nn.silu(x), "z * sigmoid(z)"),
        pullback="const N s = sigmoid(z); return g * (s * (1.0f + z * (1.0f - s)));",
        onednn="eltwise(algorithm::eltwise_swish, 1)",
        cudnn=lambda _: PointwiseStep("swish", dict(swish_beta=1.0))),
    "gelu": Kind(
        value=Both(lambda x, _: jax.nn.gelu(x, approximate=False), "z * normal_cdf(z)"),
        pullback="g * (normal_cdf(z) + z * (0.398942280f * exp(-0.5f * z * z)))",
        onednn="!f32 && eltwise(algorithm::eltwise_gelu_erf)",
        cudnn=lambda _: PointwiseStep("gelu")),
    "gelu_tanh": Kind(  # z·(1 + tanh u)/2 = z·sigmoid(2u)
        value=Both(lambda x, _: jax.nn.gelu(x, approximate=True), "z * sigmoid(2.0f * gelu_u(z))"),
        pullback="const N s = sigmoid(2.0f * gelu_u(z)), slope = 1.59576912f * (1.0f + 0.134145f * z * z);"
                 " return g * (s + z * slope * (s * (1.0f - s)));",
        onednn="eltwise(algorithm::eltwise_gelu_tanh)",
        cudnn=lambda _: PointwiseStep("gelu_tanh")),
    "mish": Kind(
        value=Both(lambda x, _: jax.nn.mish(x), "z * MishFactor(z).tanh"),
        pullback="const MishFactor factor(z);"
                 " return g * (factor.tanh + z * (factor.rest * (1.0f + factor.tanh)) * sigmoid(z));",
        onednn="!f32 && eltwise(algorithm::eltwise_mish)"),
    "softplus": Kind(
        value=Both(lambda x, _: jax.nn.softplus(x), "(z < 0.0f ? N{} : z) + log1p_up_to_1(exp(z < 0.0f ? z : -z))"),
        pullback="g * sigmoid(z)",
        pullback_from_y=Both(lambda y, g, _: g * -jnp.expm1(-y), "g * -expm1_of_negative(-y)"),
        onednn="!f32 && eltwise(algorithm::eltwise_soft_relu, 1)",
        cudnn=lambda _: PointwiseStep("softplus", dict(softplus_beta=1.0))),
    "relu_squared": Kind(
        value=Both(lambda x, _: jnp.square(jax.nn.relu(x)),
                   "const N positive = z <= 0.0f ? N{} : z; return positive * positive;"),
        pullback="z > 0.0f ? 2.0f * z * g : N{}",
        onednn="eltwise(algorithm::eltwise_relu) && eltwise(algorithm::eltwise_square)"),
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """One function: a kind and its parameter."""

    kind: str
    parameter: float | PiecewiseLinear | None = None

    @property
    def name(self) -> str:
        """Of the table, or of the family."""
        function = self.parameter
        if self in PRESETS:
            return PRESETS[self]
        if self.kind == "piecewise_gate":
            return "hard_swish"
        if not isinstance(function, PiecewiseLinear):
            return self.kind
        if function.slopes[::2] == (0.0, 0.0):
            return "clip" if function.slopes[1] == 1 and not function.center else "hard_sigmoid"
        if function.bounds == (0.0, math.inf):
            return "leaky_relu" if function.slopes[0] else "relu"
        return "piecewise_linear"

    @property
    def derivative_from_y(self) -> bool:
        """Whether the value determines the derivative. Else the backward pass needs x: an op keeps it, or computes it again
        from what it keeps."""
        if isinstance(self.parameter, PiecewiseLinear):
            return self.kind == "piecewise_linear" and self.parameter.derivative_from_y
        return KINDS[self.kind].pullback_from_y is not None and (self.parameter is None or self.parameter > 0)

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
        return KINDS[self.kind].value.jax(x, self.parameter)

    def pullback(self, y, g):
        """g · value'(x) from y, which must tell it."""
        from_y = KINDS[self.kind].pullback_from_y
        assert from_y, f"the value of {self.name} does not tell its derivative"
        return from_y.jax(y, g, self.parameter)

    def jvp(self, x, g):
        """g · value'(x), as forward mode has it."""
        return jax.jvp(self.value, (x,), (g,))[1]

    def cotangent(self, x, g):
        """The same as reverse mode has it: they differ where a product of 0 and infinity is selected away."""
        return jax.vjp(self.value, x)[1](g)[0]

    @property
    def cudnn(self) -> PointwiseStep | None:
        return KINDS[self.kind].cudnn(self.parameter)

    def attributes(self) -> dict:
        """Of a kernel's call."""
        given = self.parameter
        numbers = [] if given is None else given.numbers() if isinstance(given, PiecewiseLinear) else [given]
        return dict(activation=self.kind, parameters=np.asarray(numbers, np.float32))


def _piecewise(function: PiecewiseLinear) -> Activation:
    return Activation("piecewise_linear", function)


class Named(NamedTuple):
    """How an activation is made of the parameter that ops are given, and how that is read off its values if it has one."""

    make: Callable[[float], Activation]
    alpha: Alpha | None = None

    @property
    def has_alpha(self) -> bool:
        return self.alpha is not None


def _of_kind(name: str, kind: Kind) -> Named:
    return Named(functools.partial(Activation, name), kind.alpha) if kind.alpha else Named(lambda _: Activation(name))


NO_ACTIVATION = Activation("none")

TABLE: dict[str, Named] = {
    # max(x, 0), and min(max(x, 0), 6), as JAX differentiates them: half at the ties, which y cannot tell from beyond
    "maximum0": Named(lambda _: _piecewise(two_pieces(0.0, 0.5, 0.0))),
    "relu6": Named(lambda _: _piecewise(clip(0.0, 6.0, 0.0))),
    "clip6": Named(lambda _: _piecewise(clip(0.0, 6.0, 0.5))),
    "clip": Named(lambda alpha: _piecewise(clip(0.0, alpha, 0.5)), Alpha(lambda at: math.nan)),  # no guess: it is fitted
    # jax.nn.leaky_relu takes x >= 0 as the linear side
    "leaky_relu": Named(lambda alpha: _piecewise(two_pieces(alpha, 1.0, alpha)), Alpha(lambda at: -at[-1.0], below=1.0)),
    "hard_tanh": Named(lambda _: _piecewise(clip(-1.0, 1.0, 1.0, 1.0))),
    "hard_sigmoid": Named(lambda _: _piecewise(HARD_SIGMOID)),
    "hard_swish": Named(lambda _: Activation("piecewise_gate", HARD_SIGMOID)),
    **{name: _of_kind(name, kind) for name, kind in KINDS.items() if not kind.pieces},
}

ALIASES = {"linear": "none", "identity": "none", "swish": "silu", "hard_silu": "hard_swish", "hardswish": "hard_swish",
           "hardsigmoid": "hard_sigmoid", "hardtanh": "hard_tanh", "lrelu": "leaky_relu", "leakyrelu": "leaky_relu",
           "relu2": "relu_squared", "squared_relu": "relu_squared", "logistic": "sigmoid", "max": "maximum0"}


ffi.expect("activations", "".join(f"{name} {kind.numbers} {'y' if kind.pullback_from_y else 'z'}, " for name, kind in KINDS.items()))


@functools.cache
def named(name: str, alpha: float = 0.0) -> Activation:
    """The activation of the table; `alpha` is the parameter of those that have one."""
    return TABLE[name].make(alpha)


PRESETS = {named(name): name for name, known in TABLE.items() if not known.has_alpha}
