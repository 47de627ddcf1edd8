"""The activations that fused ops know: name -> value, derivative, and what the backward pass needs for it."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Activation:
    """value(x, alpha): the activation. pullback(y, g, alpha): g · value'(x) from the *output* y, where that determines it.

    Without `pullback` the backward pass needs x: an op keeps it, or computes it again from what it keeps.
    A `pullback` selects where JAX's own derivative does: 0 · g would be NaN for an infinite g.
    """

    value: Callable
    pullback: Callable | None = None
    has_alpha: bool = False

    def pullback_for(self, alpha: float) -> Callable | None:
        """`pullback`, None too where this alpha does not let y determine the derivative."""
        return self.pullback if not self.has_alpha or alpha > 0 else None

    def slope_times(self, x, g, alpha: float):
        """g · value'(x), as forward mode has it."""
        return jax.jvp(lambda x: self.value(x, alpha), (x,), (g,))[1]

    def cotangent(self, x, g, alpha: float):
        """The same as reverse mode has it: they differ where a product of 0 and infinity is selected away."""
        return jax.vjp(lambda x: self.value(x, alpha), x)[1](g)[0]


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772

TABLE: dict[str, Activation] = {
    "none": Activation(lambda x, alpha: x, lambda y, g, alpha: g),
    "relu": Activation(lambda x, alpha: jax.nn.relu(x), lambda y, g, alpha: jnp.where(y > 0, g, 0)),
    # max(x, 0), and min(max(x, 0), 6), as JAX differentiates them: half at the ties, which y cannot tell from beyond.
    "maximum0": Activation(lambda x, alpha: jnp.maximum(x, 0)),
    "relu6": Activation(lambda x, alpha: jax.nn.relu6(x), lambda y, g, alpha: jnp.where((y > 0) & (y < 6), g, 0)),
    "clip6": Activation(lambda x, alpha: jnp.minimum(jnp.maximum(x, 0), 6)),
    "clip": Activation(lambda x, alpha: jnp.minimum(jnp.maximum(x, 0), alpha), has_alpha=True),
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
    "selu": Activation(
        lambda x, alpha: jax.nn.selu(x),
        lambda y, g, alpha: g * jnp.where(y > 0, _SELU_SCALE, y + _SELU_SCALE * _SELU_ALPHA),
    ),
    "celu": Activation(
        lambda x, alpha: jax.nn.celu(x, alpha),
        lambda y, g, alpha: g * jnp.where(y > 0, 1, y / alpha + 1),
        has_alpha=True,
    ),
    "sigmoid": Activation(lambda x, alpha: jax.nn.sigmoid(x), lambda y, g, alpha: g * (y * (1 - y))),
    "tanh": Activation(lambda x, alpha: jnp.tanh(x), lambda y, g, alpha: g * (1 - y * y)),
    "silu": Activation(lambda x, alpha: jax.nn.silu(x)),
    "gelu": Activation(lambda x, alpha: jax.nn.gelu(x, approximate=False)),
    "gelu_tanh": Activation(lambda x, alpha: jax.nn.gelu(x, approximate=True)),
    "mish": Activation(lambda x, alpha: jax.nn.mish(x)),
    "hard_swish": Activation(lambda x, alpha: jax.nn.hard_swish(x)),
    "hard_sigmoid": Activation(
        lambda x, alpha: jax.nn.hard_sigmoid(x), lambda y, g, alpha: jnp.where((y > 0) & (y < 1), g / 6, 0)
    ),
    "hard_tanh": Activation(lambda x, alpha: jax.nn.hard_tanh(x)),  # its derivative is 1 at ±1, 0 beyond
    "softplus": Activation(lambda x, alpha: jax.nn.softplus(x), lambda y, g, alpha: g * -jnp.expm1(-y)),
    "relu_squared": Activation(lambda x, alpha: jnp.square(jax.nn.relu(x))),
}
