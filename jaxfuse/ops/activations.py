"""The activations that fused ops know: name -> value, derivative, and what the backward pass needs for it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Activation:
    """value(x, alpha): the activation. pullback(y, g, alpha): g · value'(x) from the *output* y, where that determines it.

    An activation without `pullback` is fused in inference; under autodiff the op is split before it.
    A `pullback` selects where JAX's own derivative does: 0 · g would be NaN for an infinite g.
    """

    value: Callable
    pullback: Callable | None = None
    has_alpha: bool = False


TABLE: dict[str, Activation] = {
    "none": Activation(lambda x, alpha: x, lambda y, g, alpha: g),
    "relu": Activation(lambda x, alpha: jax.nn.relu(x), lambda y, g, alpha: jnp.where(y > 0, g, 0)),
    # max(x, 0), and min(max(x, 0), 6), as JAX differentiates them: half at the ties, which y cannot tell from beyond.
    "maximum0": Activation(lambda x, alpha: jnp.maximum(x, 0)),
    "relu6": Activation(lambda x, alpha: jax.nn.relu6(x), lambda y, g, alpha: jnp.where((y > 0) & (y < 6), g, 0)),
    "clip6": Activation(lambda x, alpha: jnp.minimum(jnp.maximum(x, 0), 6)),
    "leaky_relu": Activation(
        lambda x, alpha: jax.nn.leaky_relu(x, alpha),
        # jax.nn.leaky_relu takes x >= 0 as the linear side; y has the sign of x only for alpha > 0
        lambda y, g, alpha: jnp.where(y >= 0, g, alpha * g),
        has_alpha=True,
    ),
    "elu": Activation(
        lambda x, alpha: jax.nn.elu(x, alpha),
        lambda y, g, alpha: g * jnp.where(y > 0, 1, y + alpha),
        has_alpha=True,
    ),
    "sigmoid": Activation(lambda x, alpha: jax.nn.sigmoid(x), lambda y, g, alpha: g * (y * (1 - y))),
    "tanh": Activation(lambda x, alpha: jnp.tanh(x), lambda y, g, alpha: g * (1 - y * y)),
    "silu": Activation(lambda x, alpha: jax.nn.silu(x)),
    "gelu": Activation(lambda x, alpha: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": Activation(lambda x, alpha: jax.nn.gelu(x, approximate=True)),
    "hard_swish": Activation(lambda x, alpha: jax.nn.hard_swish(x)),
    "softplus": Activation(lambda x, alpha: jax.nn.softplus(x)),
}

# Recognised in programs, for the report; no op takes them yet.
WITHOUT_KERNEL: dict[str, Activation] = {
    "clip": Activation(lambda x, alpha: jnp.minimum(jnp.maximum(x, 0), alpha), has_alpha=True),
    "selu": Activation(lambda x, alpha: jax.nn.selu(x)),
    "celu": Activation(lambda x, alpha: jax.nn.celu(x, alpha), has_alpha=True),
    "mish": Activation(lambda x, alpha: jax.nn.mish(x)),
    "hard_sigmoid": Activation(lambda x, alpha: jax.nn.hard_sigmoid(x)),
    "hard_tanh": Activation(lambda x, alpha: jax.nn.hard_tanh(x)),
    "relu_squared": Activation(lambda x, alpha: jnp.square(jax.nn.relu(x))),
}

# The kernels' names of values that two activations share; these differ in their derivatives only.
SAME_VALUE = {"maximum0": "relu", "clip6": "relu6"}
