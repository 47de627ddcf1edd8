"""What is static about a convolution: its config, checked from the arguments of `jaxfuse.ops.conv`, and the plain convolution."""

import dataclasses
import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse.ops.activations import NO_ACTIVATION, Activation
from jaxfuse.ops.errors import Arguments

Pairs = tuple[tuple[int, int], ...]
Types = tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class ConvConfig:
    """Everything static about a conv. Specs are positions, as in `lax.ConvDimensionNumbers`."""

    window_strides: tuple[int, ...]
    padding: Pairs
    rhs_dilation: tuple[int, ...]
    feature_group_count: int
    lhs_spec: tuple[int, ...]
    rhs_spec: tuple[int, ...]
    out_spec: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    has_scale: bool = False
    has_bias: bool = False
    has_residual: bool = False
    activation: Activation = NO_ACTIVATION
    precision: Any = None
    residual_last: bool = False  # added after the activation
    residual_outs: int = 0  # 1: also return z, what the activation is applied to
    out_dtype: str | None = None  # where it is not x's: nothing is rounded to x's dtype
    rounds: bool = False  # with out_dtype: the product has x's dtype, and so has its cotangent
    rounds_filter: bool = False  # w is float32 and counts as what it is in x's dtype

    @property
    def transposed(self) -> bool:
        return any(d != 1 for d in self.lhs_dilation)

    @property
    def is_decomposed(self) -> bool:
        """Whether it is differentiated as several ops."""
        return bool(self.has_scale or self.out_dtype or self.rounds_filter)

    @property
    def derivative(self) -> str:
        """What the activation's derivative is taken from: "none", "y" or "z".

        z is kept where y does not tell: writing and reading it costs less than the convolution again.
        """
        if self.activation == NO_ACTIVATION:
            return "none"
        return "y" if self.activation.derivative_from_y and not self.residual_last else "z"

    def refuse_out_dtype(self) -> str | None:
        return f"{self.out_dtype} is wanted: the kernel gives what it takes" if self.out_dtype else None

    def rounded(self, args):
        """(config, args) with w in x's dtype."""
        x, w, *rest = args
        if not self.rounds_filter:
            return self, args
        rounded = jax.ShapeDtypeStruct(w.shape, x.dtype) if isinstance(w, jax.ShapeDtypeStruct) else w.astype(x.dtype)
        return dataclasses.replace(self, rounds_filter=False), (x, rounded, *rest)

    def unpack(self, args):
        """(x, w, scale, bias, residual) from the op's argument list, None for what is absent."""
        x, w, *rest = args
        rest = iter(rest)
        return x, w, *[next(rest) if has else None for has in (self.has_scale, self.has_bias, self.has_residual)]

    def geometry_attrs(self):
        def ints(values):
            return np.asarray(values, np.int64)

        return dict(
            window_strides=ints(self.window_strides),
            padding_low=ints([low for low, _ in self.padding]),
            padding_high=ints([high for _, high in self.padding]),
            rhs_dilation=ints(self.rhs_dilation),
            lhs_dilation=ints(self.lhs_dilation),
            feature_group_count=np.int64(self.feature_group_count),
            lhs_spec=ints(self.lhs_spec),
            rhs_spec=ints(self.rhs_spec),
            out_spec=ints(self.out_spec),
        ) | self.activation.attributes()


def batch_groups_as_features(x, groups: int, spec):
    """x[g·N, ..., C] as [N, ..., g·C], axes as `spec` has them: a convolution of groups of the batch is one of groups of
    features, each of another part of the batch."""
    batch, channels = spec[:2]
    shape = list(x.shape)
    shape[batch], shape[channels] = shape[batch] // groups, shape[channels] * groups
    parts = x.reshape(*x.shape[:batch], groups, shape[batch], *x.shape[batch + 1 :])
    return jnp.moveaxis(parts, batch, channels).reshape(shape)


def dimension_numbers_of(arguments: Arguments, x, w, dimension_numbers) -> lax.ConvDimensionNumbers:
    """Channels last where none are given."""
    letters = "DHW"[5 - x.ndim :]
    try:
        return lax.conv_dimension_numbers(
            x.shape, w.shape, dimension_numbers or (f"N{letters}C", f"{letters}IO", f"N{letters}C"))
    except (TypeError, ValueError) as error:
        arguments.fail("dimension_numbers", f"{dimension_numbers!r} ({error})",
                       f"three names like ('N{letters}C', '{letters}IO', 'N{letters}C')", "spell out x, w and the output")


def _refuse_filter(arguments: Arguments, w, dn, channels: int, features: int, groups: int) -> NoReturn:
    """Raises, with the shape that w should have, and with a hint where its axes look like PyTorch's."""
    arguments.check(channels % groups == 0, "x", f"of {channels} channels", f"a multiple of feature_group_count {groups}",
                    "check feature_group_count and dimension_numbers")
    expected = list(w.shape)
    expected[dn.rhs_spec[1]] = channels // groups
    expected[dn.rhs_spec[0]] = features if features % groups == 0 else groups
    remedy = "check w, feature_group_count and dimension_numbers"
    is_last = dn.rhs_spec[0] == w.ndim - 1
    if is_last and w.shape[1] * groups == channels and w.shape[0] % groups == 0:
        remedy = f"if it is OIHW, as PyTorch has it, give w.transpose{(*range(2, w.ndim), 1, 0)}"
    arguments.fail("w", f"of shape {w.shape}", f"{tuple(expected)}, for {channels} input channels in {groups} groups", remedy)


def geometry_of(arguments, x, w, window_strides, padding, lhs_dilation, rhs_dilation, feature_group_count, dimension_numbers):
    """The first fields of ConvConfig."""
    spatial, dn = x.ndim - 2, dimension_numbers_of(arguments, x, w, dimension_numbers)
    ones = (1,) * spatial
    strides = arguments.positive_integers("window_strides", ones if window_strides is None else window_strides, spatial)
    dilation = arguments.positive_integers("rhs_dilation", ones if rhs_dilation is None else rhs_dilation, spatial)
    input_dilation = arguments.positive_integers("lhs_dilation", ones if lhs_dilation is None else lhs_dilation, spatial)
    if isinstance(padding, str):
        arguments.check(input_dilation == ones, "padding", f"{padding!r} with lhs_dilation {input_dilation}",
                        "a pair for each spatial axis", "compute them as jax.lax.conv_transpose does")
        arguments.one_of("padding", padding, ("SAME", "VALID"))
        reach = [(w.shape[d] - 1) * r + 1 for d, r in zip(dn.rhs_spec[2:], dilation)]
        padding = lax.padtype_to_pads([x.shape[d] for d in dn.lhs_spec[2:]], reach, strides, padding)
    padding = arguments.pairs("padding", padding, spatial)
    (groups,) = arguments.positive_integers("feature_group_count", (feature_group_count,), 1)
    channels, features, per_group = x.shape[dn.lhs_spec[1]], w.shape[dn.rhs_spec[0]], w.shape[dn.rhs_spec[1]]
    if channels != per_group * groups or features % groups:
        _refuse_filter(arguments, w, dn, channels, features, groups)
    return strides, padding, dilation, groups, dn.lhs_spec, dn.rhs_spec, dn.out_spec, input_dilation


def convolve(config: ConvConfig, x, w):
    dn = lax.ConvDimensionNumbers(config.lhs_spec, config.rhs_spec, config.out_spec)
    return lax.conv_general_dilated(
        x, w, config.window_strides, config.padding, config.lhs_dilation, config.rhs_dilation, dimension_numbers=dn,
        feature_group_count=config.feature_group_count, precision=config.precision, preferred_element_type=config.out_dtype)


def with_weight_gradient(params: dict, x, dy, dw) -> tuple[ConvConfig, Types] | None:
    """The config of one of the convolutions whose weight gradients a convolution of x by dy, with these parameters, is side by side, and
    the types of its x, its w and its cotangent. There are as many as groups of features; groups of the batch are groups of one
    convolution's features."""
    dn, count = params["dimension_numbers"], params["feature_group_count"]
    lhs, rhs, out = ((spec[1], spec[0], *spec[2:]) for spec in (dn.lhs_spec, dn.out_spec, dn.rhs_spec))
    strides, dilation = tuple(params["rhs_dilation"]), tuple(params["window_strides"])
    lhs_dilation = tuple(params["lhs_dilation"])
    lengths = zip([x.shape[d] for d in lhs[2:]], [dw.shape[d] for d in rhs[2:]], [dy.shape[d] for d in out[2:]])
    padding = tuple(
        (low, _padding_behind((in_ - 1) * apart + 1 + low, (k - 1) * r + 1, o, stride))
        for (low, _), apart, r, stride, (in_, k, o) in zip(params["padding"], lhs_dilation, dilation, strides, lengths))
    config = ConvConfig(strides, padding, dilation, params["batch_group_count"], lhs, rhs, out, lhs_dilation, precision=params["precision"])
    types = _one_of(count, x, lhs[0]), _one_of(count, dw, rhs[0]), _one_of(count, dy, out[1])
    made = jax.eval_shape(functools.partial(convolve, config), *types[:2])
    return (config, types) if made.shape == types[2].shape else None


def _padding_behind(length: int, window: int, positions: int, stride: int) -> int:
    """What makes so many positions of the window: none at all, where that is among the possible ones."""
    least = (positions - 1) * stride + window - length
    return max(least, min(0, least + stride - 1))


def _one_of(count: int, value, axis: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct([n // count if d == axis else n for d, n in enumerate(value.shape)], value.dtype)
