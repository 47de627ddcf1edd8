"""Layer, RMS, group and instance norm."""

import jax
import jax.numpy as jnp
from jax import lax

from layers import BETA, GAMMA, randn
from spellings import Hit, hits, misses

X = randn(2, 6, 6, 8)
ARGS = X, GAMMA, BETA


def moments(x, axes):
    return x.mean(axes, keepdims=True), x.var(axes, keepdims=True)


def fast(x, axes):
    mean = x.mean(axes, keepdims=True)
    return mean, jnp.maximum((x * x).mean(axes, keepdims=True) - mean**2, 0)


def centered(x, axes):
    mean = x.mean(axes, keepdims=True)
    return mean, ((x - mean) ** 2).mean(axes, keepdims=True)


def layer_norm(x, g, b, of=moments, axes=-1):
    mean, var = of(x, axes)
    return (x - mean) * lax.rsqrt(var + 1e-5) * g + b


def normalised(x):
    mean, var = moments(x, -1)
    return (x - mean) * lax.rsqrt(var + 1e-5)


def folded(x, g, b):
    mean, var = fast(x, -1)
    factor = g * lax.rsqrt(var + 1e-5)
    return x * factor + (b - mean * factor)


def rms_norm(x, g, b):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def group_norm(x, g, b):
    grouped = x.reshape(*x.shape[:-1], 2, 4)
    mean, var = moments(grouped, (1, 2, 4))
    return ((grouped - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape) * g + b


def group_norm_channels_first(x, g, b):
    rows = x.transpose(0, 3, 1, 2).reshape(2, 2, -1)
    mean, var = moments(rows, -1)
    return ((rows - mean) / jnp.sqrt(var + 1e-5)).reshape(2, 8, 6, 6) * g[:, None, None] + b[:, None, None]


FORWARD = {
    "layer_norm, jnp.var": layer_norm,
    "layer_norm, E[x²]-E[x]²": lambda x, g, b: layer_norm(x, g, b, fast),
    "layer_norm, E[(x-E[x])²]": lambda x, g, b: layer_norm(x, g, b, centered),
    "layer_norm, folded": folded,
    "layer_norm, divided by the deviation": lambda x, g, b: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5),
    "layer_norm, over three axes": lambda x, g, b: layer_norm(x, 1.5, 0.5, axes=(1, 2, 3)),
    "layer_norm, of a matrix": lambda x, g, b: layer_norm(x.reshape(72, 8), g, b),
    "layer_norm, of a vector": lambda x, g, b: layer_norm(x[0, 0, 0], g, b),
    "layer_norm, of bf16 in f32": lambda x, g, b: layer_norm(x.astype("bfloat16").astype("float32"), g, b).astype("bfloat16"),
    "layer_norm+relu": lambda x, g, b: jax.nn.relu(layer_norm(x, g, b)),
    "add+layer_norm": lambda x, g, b: (lambda s: (layer_norm(s, g, b), s))(jnp.sin(x) + x),
    "rms_norm": rms_norm,
    "rms_norm, gamma first": lambda x, g, b: x * g * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6),
    "rms_norm+silu": lambda x, g, b: jax.nn.silu(rms_norm(x, g, b)),
    "group_norm": group_norm,
    "group_norm+silu": lambda x, g, b: jax.nn.silu(group_norm(x, g, b)),
    "group_norm, channels first": group_norm_channels_first,
    "instance_norm": lambda x, g, b: layer_norm(x, g, b, axes=(1, 2)),
    "instance_norm, channels first": lambda x, g, b: layer_norm(
        x.transpose(0, 3, 1, 2), g[:, None, None], b[:, None, None], axes=(2, 3)),
    "layer_norm, transposed in the end": lambda x, g, b: jnp.swapaxes(layer_norm(x, g, b), 0, 1),
    "layer_norm, transposed and reshaped": lambda x, g, b: jnp.swapaxes(layer_norm(x, g, b), 1, 2).reshape(2, -1, 8),
    "group_norm, transposed in the end": lambda x, g, b: group_norm(x, g, b).transpose(3, 0, 1, 2),
    "group_norm, transposed before what follows": lambda x, g, b: 2 * jnp.swapaxes(group_norm(x, g, b), 0, 1),
}
HITS = hits(ARGS, FORWARD, both=True)
HITS["layer_norm, a sum after it"] = Hit(
    lambda x, g, b: x + layer_norm(jnp.sin(x), g, b), ARGS, ["layer_norm"], ["backward layer_norm", "layer_norm"], ["layer_norm+add"])

# What reads a norm's value in another shape, or takes statistics of it, is no part of the norm: the patterns that are found.
READ = {
    "by another norm": (lambda y, g, b: jnp.tanh(layer_norm(y, g, b)), ["layer_norm", "layer_norm+tanh"]),
    "by another norm and a skip connection": (lambda y, g, b: y + jnp.tanh(layer_norm(y, g, b, fast)), ["layer_norm", "layer_norm+tanh"]),
    "by a group norm": (lambda y, g, b: y * jnp.cos(group_norm(y, g, b)), ["layer_norm", "group_norm"]),
    "scaled by its own mean": (lambda y, g, b: y * jnp.exp(y.mean(-1, keepdims=True)), ["layer_norm"]),
    "as it is and as a matrix": (lambda y, g, b: y + jnp.cos(y.reshape(72, 8)).reshape(y.shape), ["layer_norm"]),
    "as it is and transposed": (lambda y, g, b: (y, jnp.cos(y.swapaxes(1, 2))), ["layer_norm"]),
    "as it is and rounded": (lambda y, g, b: (jnp.sin(y), jnp.cos(y.astype(jnp.bfloat16))), ["layer_norm"]),
}


def read(reader):
    return lambda x, g, b: reader(layer_norm(x, g, b), g, b)


HITS |= {f"layer_norm, read {how}": Hit(read(reader), ARGS, found, sorted([*found, *[f"backward {p}" for p in found]]))
         for how, (reader, found) in READ.items()}


def transposed_inside(x, g, b):
    mean, var = moments(x, -1)
    return jnp.swapaxes((x - mean) * lax.rsqrt(var + 1e-5), 0, 1) * g + b


def gamma_first(x, gamma, axes):
    """Gamma meets the root before the tensor does, as in Flax."""
    mean, var = moments(x, axes)
    return (x - mean) * (lax.rsqrt(var + 1e-5) * gamma)


STEPS = "its steps are not those of a normalisation by mean and variance"
MISSES = misses(ARGS, {
    "over the wrong axes": (
        lambda x, g, b: layer_norm(x, g, b, axes=(0, 1)), "norm", "statistics over axes (0, 1) of float32[2, 6, 6, 8]", []),
    "over the height only": (lambda x, g, b: layer_norm(x, 1.5, 0.5, axes=1), "norm", "statistics over axes (1,)", []),
    "centered value returned": (lambda x, g, b: (layer_norm(x, g, b), x - x.mean(-1, keepdims=True)),
                                "layer_norm", "float32[2, 6, 6, 8] is returned by the program", []),
    "normalised value read elsewhere": (lambda x, g, b: (lambda y: (y * g + b, jnp.cos(y)))(normalised(x)),
                                        "layer_norm+scale", "is read 2 times: by mul at ", ["layer_norm"]),
    "gamma for each example": (lambda x, g, b: normalised(x) * jnp.exp(x[:, :1, :1]),
                               "layer_norm+scale", "varies along axis 0, the normalised axes are (3,)", ["layer_norm"]),
    "beta along another axis": (lambda x, g, b: normalised(x) + jnp.exp(x[:1, :, :1, :1]),
                                "layer_norm+bias", "varies along axis 1, the normalised axes are (3,)", ["layer_norm"]),
    "transposed inside": (
        transposed_inside, "layer_norm+scale", "has the elements of float32[2, 6, 6, 8] in another order", ["layer_norm"]),
    "groups, and a scale of each example": (lambda x, g, b: group_norm(x, g, b) * jnp.exp(x[:, :1, :1, :1]),
                                            "group_norm+scale", "gamma or beta varies along an axis that is not one", ["group_norm"]),
    "a gamma over axes that lie apart": (lambda x, g, b: gamma_first(x, jnp.outer(b[:6], g)[:, None], (0, 2)),
                                         "norm", "statistics over axes (0, 2) of float32[2, 6, 6, 8]", []),
    "a gamma for each example and column": (lambda x, g, b: gamma_first(x, jnp.exp(x[:, :1, :, :1]), -1), "norm", STEPS, []),
    # recognised as norms, and not what the kernel computes
    "variance of another value": (
        lambda x, g, b: (x - x.mean(-1, keepdims=True)) * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g, "layer_norm", STEPS, []),
    "cube root": (lambda x, g, b: x * ((x * x).mean(-1, keepdims=True) + 1e-5) ** (-1 / 3) * g, "rms_norm", STEPS, []),
    "half of the mean": (
        lambda x, g, b: (lambda mean, var: (x - 0.5 * mean) * lax.rsqrt(var + 1e-5) * g)(*moments(x, -1)), "layer_norm", STEPS, []),
    "variance below a bound": (
        lambda x, g, b: (lambda mean, var: (x - mean) * lax.rsqrt(jnp.maximum(var, 1e-3)) * g)(*moments(x, -1)), "layer_norm", STEPS, []),
})
