"""ViT-S/16 and BERT-base as a Flax user writes them."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn


class EncoderLayer(nn.Module):
    """Attention and an MLP, each added to what it takes: with the layer norms before them, or after the sums as BERT has them."""

    heads: int
    norm_first: bool
    epsilon: float
    dtype: Any

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        norm = partial(nn.LayerNorm, epsilon=self.epsilon, dtype=self.dtype)
        dense = partial(nn.Dense, dtype=self.dtype)

        def attention(x):
            return nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, deterministic=True)(x)

        def mlp(x):
            return dense(features)(nn.gelu(dense(4 * features)(x), approximate=False))

        if self.norm_first:
            x = x + attention(norm()(x))
            return x + mlp(norm()(x))
        x = norm()(x + attention(x))
        return norm()(x + mlp(x))


class ViTS16(nn.Module):
    """Dosovitskiy et al. 2021, in the size S of Touvron et al. 2021, on patches of 16²."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=False):
        del train  # nothing in it differs
        x = nn.Conv(384, (16, 16), (16, 16), dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, 384)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, 384)).astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(cls, (x.shape[0], 1, 384)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], 384)).astype(self.dtype)
        for _ in range(12):
            x = EncoderLayer(6, True, 1e-6, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(nn.LayerNorm(epsilon=1e-6, dtype=self.dtype)(x)[:, 0])


class BertBase(nn.Module):
    """Devlin et al. 2019, for texts of one segment, with a classifier of 1000 classes."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens, train=False):
        del train  # it has no dropout
        embed = partial(nn.Embed, features=768, dtype=self.dtype)
        x = embed(30522)(tokens) + embed(512)(jnp.arange(tokens.shape[1]))
        x = nn.LayerNorm(epsilon=1e-12, dtype=self.dtype)(x)
        for _ in range(12):
            x = EncoderLayer(12, False, 1e-12, self.dtype)(x)
        pooled = jnp.tanh(nn.Dense(768, dtype=self.dtype)(x[:, 0]))
        return nn.Dense(1000, dtype=self.dtype)(pooled)
