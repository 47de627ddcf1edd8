"""Means over the places of images, as they stand at a network's end and in squeeze-and-excite."""

import jax
import jax.numpy as jnp
from jax import lax

from layers import randn
from spellings import hits, misses

X = randn(2, 6, 6, 8)
LOW = X.astype(jnp.bfloat16)
W = randn(8, 8)


def squeezed_and_excited(x):
    gate = jax.nn.sigmoid(x.mean((1, 2), keepdims=True))
    return x * gate


FORWARD = {
    "global_average_pool": lambda x: x.mean((1, 2)),
    "global_average_pool, kept axes": lambda x: x.mean((1, 2), keepdims=True),
    "global_average_pool, negative axes": lambda x: jnp.mean(x, axis=(-3, -2)),
    "global_average_pool, sum over a number": lambda x: x.sum((1, 2)) / 36,
    "global_average_pool, sum times a number": lambda x: x.sum((1, 2)) * (1 / 36),
    "global_average_pool, lax": lambda x: lax.reduce(x, 0.0, lax.add, (1, 2)) / x[0, ..., 0].size,
    "global_average_pool, vmapped": lambda x: jax.vmap(lambda x: x.mean((0, 1)))(x),
    "global_average_pool, two batch axes": lambda x: x.reshape(2, 6, 6, 2, 4).mean((2, 3)),
    "global_average_pool, tokens": lambda x: x.reshape(2, 36, 8).mean(1),
    "global_average_pool, squeeze and excite": squeezed_and_excited,
    "global_average_pool, in a scan": lambda x: lax.scan(lambda c, x: (c, x.mean((1, 2))), 0, x[:, None])[1],
    "global_average_pool, what else is read is made in a loop": lambda x: (lambda y: (y, y.mean((1, 2))))(jnp.exp(x)),
}
HALF = {
    "global_average_pool, bfloat16": lambda x: x.mean((1, 2)),
    "global_average_pool, bfloat16 kept axes": lambda x: x.mean((1, 2), keepdims=True),
    "global_average_pool, bfloat16 in float32": lambda x: x.astype(jnp.float32).mean((1, 2)),
    "global_average_pool, bfloat16 to float32": lambda x: jnp.mean(x, (1, 2), dtype=jnp.float32),
    "global_average_pool, bfloat16 squeeze and excite": squeezed_and_excited,
}
HITS = hits([X], FORWARD) | hits([LOW], HALF)
MISSES = misses((X,), {
    "a sum": (lambda x: x.sum((1, 2)), "", "", []),
    "over another number": (lambda x: x.sum((1, 2)) / 35, "", "", []),
    "a sum that is read too": (lambda x: (lambda s: (s, s / 36))(x.sum((1, 2))), "", "", []),
    "over the batch too": (lambda x: x.mean((0, 1, 2)), "", "", []),
    "over rows alone": (lambda x: x.mean(1), "", "", []),
    "over channels": (lambda x: x.mean(-1), "", "", []),
    "channels first": (lambda x: x.mean((2, 3)), "", "", []),
    "without a batch": (lambda x: x[0].mean((0, 1)), "", "", []),
    "of what is made in a loop": (lambda x: jnp.exp(x).mean((1, 2)), "", "", []),
    "the largest": (lambda x: x.max((1, 2)), "", "", []),
})
