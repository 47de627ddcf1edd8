"""An MLP-Mixer in Flax linen: patches by a strided convolution, then dense layers over places and over channels in turn."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from . import Network, cross_entropy, image


class MlpBlock(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.mlp_dim)(x)
        y = nn.gelu(y)
        return nn.Dense(x.shape[-1])(y)


class MixerBlock(nn.Module):
    tokens_mlp_dim: int
    channels_mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        y = jnp.swapaxes(y, 1, 2)
        y = MlpBlock(self.tokens_mlp_dim, name="token_mixing")(y)
        y = jnp.swapaxes(y, 1, 2)
        x = x + y
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.channels_mlp_dim, name="channel_mixing")(y)


class MlpMixer(nn.Module):
    patch: int = 16
    num_classes: int = 1000
    num_blocks: int = 12
    hidden_dim: int = 768
    tokens_mlp_dim: int = 384
    channels_mlp_dim: int = 3072

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.hidden_dim, (self.patch, self.patch), strides=(self.patch, self.patch), name="stem")(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for _ in range(self.num_blocks):
            x = MixerBlock(self.tokens_mlp_dim, self.channels_mlp_dim)(x)
        x = nn.LayerNorm(name="pre_head_layer_norm")(x)
        x = jnp.mean(x, axis=1)
        return nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros, name="head")(x)


def mixer(small: bool) -> Network:
    model = MlpMixer(8, 10, 2, 32, 16, 64) if small else MlpMixer()
    x = image(4, 32) if small else image(8, 224)

    def init():
        return model.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype))["params"], {}

    def apply(params, state, x):
        return model.apply({"params": params}, x)

    def loss(params, state, x, labels):
        return cross_entropy(apply(params, state, x), labels), state

    return Network(init, apply, loss, x)
