"""Activations as `jax.nn`, Flax and Keras spell them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras

ACTIVATIONS = {
    "relu": [jax.nn.relu, nn.relu, keras.activations.relu, keras.ops.relu, keras.layers.ReLU(),
             lambda x: jnp.where(jnp.isnan(x) | (x > 0), x, 0)],
    "maximum0": [lambda x: jnp.maximum(x, 0), lambda x: jnp.maximum(0.0, x), lambda x: jnp.clip(x, 0)],
    "relu6": [jax.nn.relu6, nn.relu6, keras.activations.relu6, keras.ops.relu6, keras.layers.ReLU(6.0)],
    "clip6": [lambda x: jnp.clip(x, 0, 6), lambda x: jnp.maximum(jnp.minimum(x, 6), 0)],
    "clip": [lambda x: jnp.clip(x, 0, 5), lambda x: jnp.clip(x, 0, 1)],
    "leaky_relu": [jax.nn.leaky_relu, nn.leaky_relu, keras.activations.leaky_relu, keras.layers.LeakyReLU(0.3)],
    "elu": [jax.nn.elu, nn.elu, keras.activations.elu, lambda x: jax.nn.elu(x, 0.5)],
    "elu_expm1": [lambda x: jnp.where(x > 0, x, jnp.expm1(x)), lambda x: jnp.where(x < 0, jnp.expm1(x), x),
                  lambda x: jnp.where(x > 0, x, 0.5 * jnp.expm1(x))],
    "selu": [jax.nn.selu, nn.selu, keras.activations.selu],
    "celu": [lambda x: jax.nn.celu(x, 0.7), lambda x: nn.celu(x, 2.0), lambda x: keras.activations.celu(x, 2.0)],
    "gelu": [lambda x: jax.nn.gelu(x, approximate=False), keras.activations.gelu,
             lambda x: 0.5 * x * (1 + jax.scipy.special.erf(x / jnp.sqrt(2.0)))],
    "gelu_tanh": [jax.nn.gelu, nn.gelu, lambda x: keras.activations.gelu(x, approximate=True),
                  lambda x: 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3)))],
    "silu": [jax.nn.silu, nn.swish, keras.activations.silu, keras.ops.silu, lambda x: x * jax.nn.sigmoid(x)],
    "mish": [jax.nn.mish, keras.activations.mish, lambda x: x * jnp.tanh(jax.nn.softplus(x))],
    "hard_swish": [jax.nn.hard_swish, nn.hard_silu, keras.activations.hard_silu],
    "hard_sigmoid": [jax.nn.hard_sigmoid, nn.hard_sigmoid, keras.activations.hard_sigmoid],
    "hard_tanh": [jax.nn.hard_tanh, nn.hard_tanh, keras.activations.hard_tanh],
    "sigmoid": [jax.nn.sigmoid, nn.sigmoid, keras.activations.sigmoid, lambda x: 1 / (1 + jnp.exp(-x))],
    "tanh": [jnp.tanh, nn.tanh, keras.activations.tanh],
    "softplus": [jax.nn.softplus, nn.softplus, keras.activations.softplus],
    "relu_squared": [lambda x: jax.nn.relu(x) ** 2, lambda x: jnp.square(nn.relu(x))],
}
