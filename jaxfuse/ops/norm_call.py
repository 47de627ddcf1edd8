"""`layer_norm`, `rms_norm` and `group_norm`, as they are called: what their arguments must be, and the op's config for them."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from jaxfuse.ops.errors import Arguments, Array, checked_names
from jaxfuse.ops.naming import ActivationArgument, activation_of
from jaxfuse.ops.norm import normalised
from jaxfuse.ops.norm_config import NormConfig
from jaxfuse.runtime.settings import ours


@checked_names
@ours
def layer_norm(x: Array, gamma: Array, beta: Array, residual: Array | None = None, *, activation: ActivationArgument = None,
               epsilon: float = 1e-6, return_sum: bool = False) -> Any:
    """Layer normalisation over the last axis, with a residual add before and an activation after.

    y = activation((s - mean(s)) · gamma / sqrt(var(s) + epsilon) + beta),  s = x + residual      (Ba et al. 2016)

    Args:
      x: float array of rank 1 or more: `[..., features]`.
      gamma, beta: `[features]`.
      residual: like x.
      activation: a name in `jaxfuse.ops.activations.TABLE` that has no parameter, a function such as `jax.nn.leaky_relu`
        that is one of them, or None.
      epsilon: added to the variance, which is the biased one.
      return_sum: also return s, in x's dtype.

    Returns: y in x's dtype, or (y, s). Statistics are float32.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    return _over_last_axis("layer_norm", x, gamma, beta, residual, activation, epsilon, return_sum, centered=True)


@checked_names
@ours
def rms_norm(x: Array, gamma: Array, residual: Array | None = None, *, activation: ActivationArgument = None,
             epsilon: float = 1e-6, return_sum: bool = False) -> Any:
    """Root mean square normalisation over the last axis: `layer_norm` without mean and beta.

    y = activation(s · gamma / sqrt(mean(s²) + epsilon)),  s = x + residual      (Zhang & Sennrich 2019)

    Arguments, results and errors are those of `layer_norm`.
    """
    return _over_last_axis("rms_norm", x, gamma, None, residual, activation, epsilon, return_sum, centered=False)


def _over_last_axis(op, x, gamma, beta, residual, activation, epsilon, return_sum, centered):
    arguments = Arguments(op)
    vectors = dict(gamma=gamma) | (dict(beta=beta) if centered else {})
    added = {} if residual is None else dict(residual=residual)
    arguments.floats(x=x, **vectors, **added)
    arguments.check(x.ndim >= 1, "x", "of rank 0", "rank 1 or more", "give it a features axis")
    arguments.per_channel(x.shape[-1], "feature of x", **vectors)
    arguments.like(x, "x", **added)
    arguments.check(added or not return_sum, "return_sum", "True without a residual", "a residual", "x is the sum")
    config = NormConfig(
        (1, 1, x.shape[-1]), 1, arguments.number("epsilon", epsilon, at_least=0), centered=centered,
        has_residual=bool(added), wants_sum=bool(return_sum),
        activation=activation_of(arguments, activation))
    return normalised(config, x, *added.values(), gamma, jnp.zeros_like(gamma) if beta is None else beta)


@checked_names
@ours
def group_norm(x: Array, gamma: Array, beta: Array, *, groups: int, activation: ActivationArgument = None, epsilon: float = 1e-6,
               axis: int = -1) -> jax.Array:
    """Group normalisation: statistics of each example over all positions and the channels of each group, and an activation
    after. With as many groups as channels it is instance norm.

    y = activation((x - mean) · gamma / sqrt(var + epsilon) + beta)      (Wu & He 2018)

    Args:
      x: float array of rank 2 or more; its first axis is the batch, `axis` its channel axis, which is the last or the second.
      gamma, beta: `[channels]`.
      groups: a divisor of the number of channels; group i has the i-th part of them.
      activation: a name in `jaxfuse.ops.activations.TABLE` that has no parameter, a function such as `jax.nn.leaky_relu`
        that is one of them, or None.
      epsilon: added to the variance, which is the biased one.

    Returns: y in x's dtype. Statistics are float32.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    arguments = Arguments("group_norm")
    arguments.floats(x=x, gamma=gamma, beta=beta)
    arguments.check(x.ndim >= 2, "x", f"of rank {x.ndim}", "rank 2 or more", "add a batch axis")
    arguments.check(isinstance(axis, numbers.Integral) and axis in (-1, x.ndim - 1, 1, 1 - x.ndim), "axis", repr(axis),
                    f"the last axis of x, whose rank is {x.ndim}, or 1", "transpose x")
    channels = x.shape[axis]
    arguments.per_channel(channels, "channel of x", gamma=gamma, beta=beta)
    arguments.check(isinstance(groups, numbers.Integral) and int(groups) >= 1 and channels % int(groups) == 0, "groups", repr(groups),
                    f"a divisor of the {channels} channels", "choose another")
    last = int(axis) % x.ndim == x.ndim - 1
    positions = math.prod(x.shape[1:]) // max(1, channels)
    length = channels // groups if last else channels // groups * positions
    config = NormConfig(
        (positions if last else 1, int(groups), length), x.ndim - 1, arguments.number("epsilon", epsilon, at_least=0),
        1 if last else positions, activation=activation_of(arguments, activation))
    return normalised(config, x, gamma, beta)
