"""When a fused dense layer is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import OpRules, SizeSweep


def size(config, types) -> int:
    """2 · products."""
    x, w = (t.shape for t in types[:2])
    return 2 * math.prod(x) * math.prod(w) // math.prod(w[d] for d in (*config.w_contracted, *config.w_batch))


def shape_class(config, types) -> str:
    return "batched" if config.x_batch else "linear" if config.activation.kind == "none" else "activated"


def _linear(x, w, b):
    return x @ w + b.astype(x.dtype)


def _activated(x, w, b):
    return jax.nn.gelu(x @ w + b.astype(x.dtype), approximate=False)


def _batched(x, w):
    """As attention has it: between the batch and the heads of one operand lie its rows."""
    return jnp.einsum("bhtk,bkhn->bhtn", x, w)


def _shapes(*rows):
    """(rows, features)"""
    return tuple(((m, k), (k, k), (k,)) for m, k in rows)


_ROWS = _shapes((1, 64), (8, 64), (64, 64), (8, 256), (1, 768), (128, 128), (8, 768), (128, 256), (256, 512),
               (1024, 1024))
_HEADS = tuple(((b, h, t, d), (b, d, h, d)) for b, h, t, d in (
    (1, 2, 8, 8), (1, 4, 16, 16), (2, 4, 32, 32), (8, 1, 64, 64), (2, 8, 64, 64), (8, 12, 64, 64), (8, 12, 128, 128)))
RULES = OpRules(
    "operations", size, shape_class=shape_class,
    size_sweeps={"linear": SizeSweep(_linear, _ROWS), "activated": SizeSweep(_activated, _ROWS), "batched": SizeSweep(_batched, _HEADS)},
)
