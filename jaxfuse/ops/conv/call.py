"""`conv`, as it is called: what its arguments must be, and the op's config for them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.conv.config import ConvConfig, batch_groups_as_features, convolve, dimension_numbers_of, geometry_of
from jaxfuse.ops.conv.conv import OP
from jaxfuse.ops.errors import Arguments, Array, checked_names
from jaxfuse.ops.naming import ActivationArgument, activation_of
from jaxfuse.runtime.settings import ours


@checked_names
@ours
def conv(
    x: Array, w: Array, bias: Array | None = None, residual: Array | None = None, *, scale: Array | None = None,
    activation: ActivationArgument = None, alpha: float = 0.0, residual_last: bool = False,
    window_strides: Sequence[int] | None = None, padding: str | Sequence[tuple[int, int]] = "SAME",
    lhs_dilation: Sequence[int] | None = None, rhs_dilation: Sequence[int] | None = None, feature_group_count: int = 1,
    batch_group_count: int = 1,
    dimension_numbers: tuple[str, str, str] | lax.ConvDimensionNumbers | None = None, precision: Any = None) -> jax.Array:
    """y = activation(scale · conv(x, w) + bias + residual), one kernel where there is one.

    Args:
      x: input, float, rank 3 to 5; channels-last by default (NWC, NHWC, NDHWC).
      w: filter of x's dtype; spatial dims, then input channels per group, then output channels by default (HWIO).
      bias, scale: `[output channels]`, x's dtype or float32.
      residual: like the output, in shape and dtype; added before the activation, or after it if `residual_last`.
      activation: a name in `jaxfuse.ops.activations.TABLE`, a function such as `jax.nn.relu` that is one of them, or None;
        `alpha` is the parameter of the names that have one.
      window_strides, padding ("SAME", "VALID" or pairs), lhs_dilation, rhs_dilation, feature_group_count, batch_group_count,
        dimension_numbers, precision: as in `jax.lax.conv_general_dilated`; a transposed convolution is one with lhs_dilation,
        padded by pairs.

    Returns: y in x's dtype. Autodiff keeps x, w and y, or in place of y what the activation is applied to, where y does not
    tell its derivative.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    arguments = Arguments("conv")
    optional = {name: a for name, a in dict(scale=scale, bias=bias, residual=residual).items() if a is not None}
    arguments.floats(x=x, w=w, **optional)
    arguments.check(3 <= x.ndim <= 5, "x", f"of rank {x.ndim}", "rank 3, 4 or 5", "add the missing axis")
    arguments.check(w.ndim == x.ndim, "w", f"of rank {w.ndim}", f"rank {x.ndim}, as x has", "reshape it")
    arguments.check(w.dtype == x.dtype, "w", str(w.dtype), f"{x.dtype}, as x is", "cast one of them")
    if batch_group_count != 1:
        x = _batch_groups(arguments, x, w, batch_group_count, feature_group_count, dimension_numbers)
        feature_group_count = batch_group_count
    geometry = geometry_of(
        arguments, x, w, window_strides, padding, lhs_dilation, rhs_dilation, feature_group_count, dimension_numbers)
    plain = ConvConfig(*geometry)
    out = jax.eval_shape(functools.partial(convolve, plain), x, w)
    features = w.shape[plain.rhs_spec[0]]
    residual_only = {name: optional.pop(name) for name in ("residual",) if name in optional}
    arguments.per_channel(features, "output channel", **optional)
    arguments.like(out, "the output", **residual_only)
    chosen = activation_of(arguments, activation, alpha)
    config = dataclasses.replace(
        plain, has_scale=scale is not None, has_bias=bias is not None, has_residual=residual is not None,
        activation=chosen,
        precision=tuple(precision) if isinstance(precision, list) else precision,
        residual_last=bool(residual_last) and residual is not None and chosen != NO_ACTIVATION)
    return OP(config, x, w, *[a for a in (scale, bias, residual) if a is not None])[0]


def _batch_groups(arguments: Arguments, x, w, groups, feature_groups, dimension_numbers):
    """x with its groups of the batch as groups of features."""
    (groups,) = arguments.positive_integers("batch_group_count", (groups,), 1)
    arguments.check(feature_groups == 1, "batch_group_count", f"{groups} with feature_group_count {feature_groups}",
                    "one of them", "leave out the other")
    spec = dimension_numbers_of(arguments, x, w, dimension_numbers).lhs_spec
    arguments.check(x.shape[spec[0]] % groups == 0, "x", f"a batch of {x.shape[spec[0]]}",
                    f"a multiple of batch_group_count {groups}", "check batch_group_count and dimension_numbers")
    return batch_groups_as_features(x, groups, spec)
