"""Batch norm in training: its statistics and what is made of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from layers import BETA, GAMMA, ZR, Z, batch_norm, fast_moments, slow_moments
from spellings import Hit, Miss, hits, misses
from spellings.layouts import first

ARGS = Z, GAMMA, BETA, ZR
OVER = (0, 1, 2)


def centered(x, g, b, r):
    xc = x - x.mean(OVER)
    return jax.nn.relu(xc * lax.rsqrt((xc**2).mean(OVER) + 1e-5) * g + b + r)


def normalised(x, mean, var, gamma, beta):
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * gamma + beta)


def spelled(moments, normalize):
    def fn(x, g, b, r):
        mean, var = moments(x)
        return normalize(x, mean, var, g, b, r), mean, var

    return fn


def running_average(x, g, b, r):
    mean, var = fast_moments(x)
    return normalised(x, mean, var, g, b), 0.9 * g + 0.1 * mean, 0.9 * b + 0.1 * var * 144 / 143


def self_residual(x, g, b, r):
    mean, var = fast_moments(x)
    return (x - mean) * lax.rsqrt(var + 1e-5) + r * mean


HITS = hits(ARGS, {
    "bn+add+relu, E[x²]-E[x]²": spelled(fast_moments, lambda x, m, v, g, b, r: jax.nn.relu(
        (x - m) * (lax.rsqrt(v + 1e-5) * g) + b + r)),
    "bn+add+relu, jnp.var": spelled(slow_moments, lambda x, m, v, g, b, r: jax.nn.relu(
        r + (x - m) / jnp.sqrt(v + 1e-5) * g + b)),
    "bn+add+relu, folded": spelled(fast_moments, lambda x, m, v, g, b, r: jax.nn.relu(
        x * (g * lax.rsqrt(v + 1e-5)) + (b - m * g * lax.rsqrt(v + 1e-5)) + r)),
    "bn+relu": spelled(fast_moments, lambda x, m, v, g, b, r: normalised(x, m, v, g, b)),
    "bn+relu6": spelled(slow_moments, lambda x, m, v, g, b, r: jax.nn.relu6((x - m) * lax.rsqrt(v + 1e-5) * g + b)),
    "bn+maximum0": spelled(slow_moments, lambda x, m, v, g, b, r: jnp.maximum((x - m) * lax.rsqrt(v + 1e-5) * g + b, 0)),
    "bn": spelled(fast_moments, lambda x, m, v, g, b, r: (x - m) * lax.rsqrt(v + 1e-5)),
    "bn+add": spelled(slow_moments, lambda x, m, v, g, b, r: (x - m) * lax.rsqrt(v + 1e-5) * g + b + r),
    "bn+add+relu, shared centering": centered,
    "bn+relu, statistics are served from the outputs": running_average,
})
HITS |= hits(ARGS, {
    "bn+add+relu, subtracted": lambda x, g, b, r: jax.nn.relu(r - batch_norm(x, g, b)),
    "bn+add+relu, residual subtracted": lambda x, g, b, r: jax.nn.relu(batch_norm(x, g, b) - r),
    "bn+add, residual subtracted": lambda x, g, b, r: batch_norm(x, g, b) - r,
}, both=True)
# The gradient's kernel would add the residual to know silu's argument.
HITS["bn+add+silu, residual subtracted"] = Hit(
    lambda x, g, b, r: jax.nn.silu(batch_norm(x, g, b) - r), ARGS, ["bn+add+silu"], ["backward bn+add", "bn+add"])
MISSES = misses(ARGS, {
    "over the wrong axes": (lambda x, g, b, r: (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 1e-5),
                            "norm", "statistics over axes (0, 1)", []),
    "residual of its own statistics": (self_residual, "bn+add", "own statistics", ["bn"]),
    "scale along another axis": (spelled(fast_moments, lambda x, m, v, g, b, r: (x - m) * lax.rsqrt(v + 1e-5) * r[:, :1, :1]),
                                 "bn+scale", "varies along axis 0", ["bn"]),
} | {
    "statistics only": (lambda x, g, b, r: fast_moments(x), "bn", "nothing normalises it", []),
})

MISSES |= misses((Z[:0], GAMMA, BETA, ZR[:0]), {
    "no example": (lambda x, g, b, r: normalised(x, *fast_moments(x), g, b), "bn", "empty array of shape (0, 6, 6, 8)", []),
})

# --- what x is made of: its derivative is a product with another tensor, or with x itself -------------------------------

MADE = {
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "gelu, behind a bias": lambda x: jax.nn.gelu(x + BETA),
    "a scale": lambda x: x * GAMMA,
    "dropout": lambda x: jnp.where(ZR > 0, x / 0.5, 0),
    "a square": jnp.square,
    "bfloat16, in float32": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
}
HITS |= hits(ARGS, {f"bn+add+relu, of {name}": lambda x, g, b, r, made=made: jax.nn.relu(batch_norm(made(x), g, b) + r)
                    for name, made in MADE.items()}, both=True)

# --- statistics of `y.reshape(-1, C)`, applied to y, which was not reshaped, or to the reshaped value ----------------


def flat(moments, before=lambda flat: flat):
    def fn(x, gamma, beta, r):
        mean, var = moments(before(x.reshape(-1, 8)), (0,))
        return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * gamma + beta + r), mean, var

    return fn


def centered_moments(x, axes):
    mean = x.mean(axes)
    return mean, ((x - mean) ** 2).mean(axes)


def both_flat(x, gamma, beta, r):
    flat = x.reshape(-1, 8)
    mean, var = fast_moments(flat, (0,))
    return jax.nn.relu(((flat - mean) * lax.rsqrt(var + 1e-5) * gamma + beta).reshape(x.shape) + r)


def flat_channels_first(x, gamma, beta, r):
    """A view of which the channels are the middle."""
    x = x.transpose(0, 3, 1, 2)
    flat = x.reshape(4, 8, -1)
    mean, var = flat.mean((0, 2)), flat.var((0, 2))
    up = lambda v: v[:, None, None]
    return jax.nn.relu((x - up(mean)) * up(lax.rsqrt(var + 1e-5) * gamma) + up(beta))


def other_order(x, gamma, beta, r):
    """The reshaped value's columns are not the channels."""
    mean, var = fast_moments(x.transpose(0, 3, 1, 2).reshape(-1, 8), (0,))
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * gamma + beta + r)


def half_of_the_channels(x, gamma, beta, r):
    mean, var = fast_moments(x.reshape(-1, 4), (0,))
    return jax.nn.relu((x - jnp.tile(mean, 2)) * lax.rsqrt(jnp.tile(var, 2) + 1e-5) * gamma + beta + r)


HITS |= hits(ARGS, {
    "bn+add+relu, flat, slow": flat(slow_moments),
    "bn+add+relu, flat, fast": flat(fast_moments),
    "bn+add+relu, flat, wide": flat(fast_moments, lambda flat: flat.astype(jnp.float32)),
    "bn+add+relu, flat, centered": flat(centered_moments),
    "bn+add+relu, flat, both": both_flat,
}, both=True)
HITS |= hits(ARGS, {"bn+relu, flat, channels first": flat_channels_first})
# the gradient of x is read in another shape only
HITS |= hits((Z.reshape(-1, 8), GAMMA, BETA, ZR), {
    "bn+add+relu, of what was flat": lambda x, g, b, r: jax.nn.relu(batch_norm(x.reshape(Z.shape), g, b) + r)}, both=True)
MISSES |= misses(ARGS, {
    "flat, in another order": (other_order, "bn", "nothing normalises it", []),
    "flat, half of the channels": (half_of_the_channels, "bn", "nothing normalises it", []),
})

# --- channels that are not last, and statistics under vmap ---------------------------------------------------------


def norm(x, axes, g, b, r):
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * g + b + r), mean, var


def under_vmap(x, g, b, r):
    """Equinox: one image at a time, channels first, means of means."""

    def one(x, r):
        mean = lax.pmean(x.mean((1, 2)), "batch")[:, None, None]
        var = lax.pmean(jnp.square(x - mean).mean((1, 2)), "batch")[:, None, None]
        return jax.nn.relu((x - mean) / jnp.sqrt(jnp.maximum(var, 0) + 1e-5) * g[:, None, None] + b[:, None, None] + r), mean

    return jax.vmap(one, axis_name="batch", out_axes=(0, None))(first(x), first(r))


def of_squares_under_vmap(x, g, b, r):
    """Haiku with `cross_replica_axis`: E[x²] - E[x]², each a mean of means."""

    def one(x):
        mean = lax.pmean(x.mean((0, 1), keepdims=True), "batch")
        var = lax.pmean(jnp.square(x).mean((0, 1), keepdims=True), "batch") - jnp.square(mean)
        return jax.nn.relu((x - mean) * (g * lax.rsqrt(var + 1e-5)) + b)

    return jax.vmap(one, axis_name="batch")(x)


def stacked_under_vmap(x, g, b, r):
    """Flax with `axis_name`: one pmean for both."""

    def one(x):
        both = lax.pmean(jnp.stack([x.mean((0, 1)), jnp.square(x).mean((0, 1))]), "batch")
        mean, var = both[0], jnp.maximum(0, both[1] - jnp.square(both[0]))
        return jax.nn.relu((x - mean) * (g * lax.rsqrt(var + 1e-5)) + b)

    return jax.vmap(one, axis_name="batch")(x)


HITS |= hits(ARGS, {
    "bn+add+relu, channels first": lambda x, g, b, r: norm(first(x), (0, 2, 3), g[:, None, None], b[:, None, None], first(r)),
    "bn+add+relu, channels in the middle": lambda x, g, b, r: norm(
        x.transpose(0, 1, 3, 2), (0, 1, 3), g[:, None], b[:, None], r.transpose(0, 1, 3, 2)),
    "bn+add+relu, mean of means": under_vmap,
    "bn+relu, mean of means of squares": of_squares_under_vmap,
    "bn+relu, one mean of both means": stacked_under_vmap,
    "bn+add+relu, unbiased": lambda x, g, b, r: jax.nn.relu(
        (x - x.mean(OVER)) * lax.rsqrt(x.var(OVER, ddof=1) + 1e-5) * g + b + r),
})

# --- with a mask: one of ones, which the program fixes, masks nothing; one that is data is left alone -----------------


def masked(mask):
    def fn(x, gamma, beta):
        where = mask(x)
        return normalised(x, jnp.mean(x, OVER, where=where), jnp.var(x, OVER, where=where), gamma, beta)

    return fn


def weighted(weights):
    def fn(x, gamma, beta):
        w = weights(x)
        mean = (x * w).sum(OVER) / w.sum()
        return normalised(x, mean, ((x - mean) ** 2 * w).sum(OVER) / w.sum(), gamma, beta)

    return fn


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        return nn.relu(nn.BatchNorm(use_running_average=False)(x, mask=mask))


ONES, ZEROS = np.ones(8, np.float32), np.zeros(8, np.float32)
VARIABLES = dict(params=dict(BatchNorm_0=dict(scale=ONES, bias=ZEROS)), batch_stats=dict(BatchNorm_0=dict(mean=ZEROS, var=ONES)))


def linen(mask):
    return lambda x, gamma, beta: Norm().apply(VARIABLES, gamma * x + beta, mask(x), mutable=["batch_stats"])


def masked_by_place(x, g, b):
    mask = jnp.arange(6)[None, :, None, None] < 4
    mean = x.mean(OVER, where=mask)
    return (x - mean) * lax.rsqrt((x * x).mean(OVER, where=mask) - mean * mean + 1e-5) * g + b


OUT, NO_MEAN = ("bn", "leaves elements out"), ("bn", "not made into a mean")
HITS |= hits(ARGS[:3], {"bn+relu, mask of ones": masked(lambda x: jnp.ones(x.shape, bool))}, both=True)
HITS |= hits(ARGS[:3], {
    "bn+relu, mask True": masked(lambda x: True),
    "bn+relu, mask of each pixel": masked(lambda x: jnp.ones((*x.shape[:3], 1), bool)),
    "bn+relu, weights that are all one": weighted(lambda x: jnp.ones((*x.shape[:3], 1))),
    "bn+relu, Flax's mask, None": linen(lambda x: None),
    "bn+relu, Flax's mask, ones": linen(lambda x: jnp.ones(x.shape, bool)),
})
MISSES |= {name: Miss(function, ARGS[:3], left) for name, (function, left) in {
    "mask of data": (masked(lambda x: x > 0), [OUT]),
    "mask that leaves an example out": (masked(lambda x: (jnp.arange(4) < 3).reshape(4, 1, 1, 1)), [OUT]),
    "mask that leaves rows out": (masked_by_place, [OUT]),
    "mask of the square alone": (lambda x, gamma, beta: normalised(
        x, x.mean(OVER), jnp.mean((x - x.mean(OVER)) ** 2, OVER, where=x > 1), gamma, beta), [NO_MEAN]),
    "Flax's mask, data": (linen(lambda x: x > 0), [OUT]),
}.items()}
