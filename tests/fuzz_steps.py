"""The steps of which `fuzz.py` makes programs: layers as different people spell them.

A step is `function(scope, x, key, **options)`. It takes an array of any rank from 2 on (`[n, c]`, `[n, t, c]`, an image) and
leaves it alone where the rank does not suit it, so that a program is valid whichever steps are taken out of it.
"""

import dataclasses
import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

STEPS = {}  # name -> (function, {option: choices})


def step(**choices):
    def register(function):
        STEPS[function.__name__] = function, choices
        return function

    return register


@dataclasses.dataclass
class Scope:
    """Where a step runs: `params` is what it takes its parameters from, by name; what is not there yet is made and put there.
    `first`: images are channels-first. `mapped`: under a vmap over the batch, whose name is "batch". `extras`: what else enters
    the loss."""

    params: dict
    first: bool
    initialising: bool
    mapped: bool = False
    prefix: str = ""
    extras: list = dataclasses.field(default_factory=list)

    def param(self, key, name, *shape, scale=0.3, offset=0.0):
        name = f"{self.prefix}{key}.{name}"
        if self.initialising:
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            self.params[name] = (offset + scale * rng.normal(size=shape)).astype(np.float32)
        return jnp.asarray(self.params[name])

    def inner(self, **changes):
        return dataclasses.replace(self, extras=[], **changes)

    def rank(self, x):
        """Counting the batch, whether it is there or mapped over."""
        return x.ndim + self.mapped

    def axis(self, x):
        """Of the channels."""
        return 1 - self.mapped if self.first and self.rank(x) >= 4 else x.ndim - 1

    def channels(self, x):
        return x.shape[self.axis(x)]

    def along(self, x, vector):
        """A vector of channels as an operand of x."""
        return vector.reshape([-1 if d == self.axis(x) else 1 for d in range(x.ndim)])


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


# --- layers ------------------------------------------------------------------------------------------------------

BIASES = ("none", "right", "left", "broadcast", "vector")


def biased(scope, y, key, bias):
    if bias == "none":
        return y
    b = scope.param(key, "b", scope.channels(y)).astype(y.dtype)
    broadcast = b if bias == "vector" and scope.axis(y) == y.ndim - 1 else scope.along(y, b)
    if bias == "broadcast":
        broadcast = jnp.broadcast_to(broadcast, y.shape)
    return broadcast + y if bias == "left" else y + broadcast


@step(features=(4, 8, 8, 16, 5, 0, 0), size=(1, 3, 3, 2), stride=(1, 1, 1, 2), padding=("SAME", "SAME", "VALID", "pad", "odd"),
      dilation=(1, 1, 1, 2), groups=("one", "one", "one", "two", "depthwise"), bias=BIASES, spec=("own", "own", "own", "other"))
def conv(scope, x, key, features, size, stride, padding, dilation, groups, bias, spec):
    if scope.rank(x) != 4:
        return x
    x = x[None] if scope.mapped else x
    first = scope.first
    if spec == "other":  # a layer written for the other layout
        x, first = jnp.moveaxis(x, *((1, -1) if first else (-1, 1))), not first
    channels = x.shape[1 if first else -1]
    features = features or channels
    spatial = x.shape[2:] if first else x.shape[1:3]
    reach = (size - 1) * dilation
    if padding == "VALID" and min(spatial) <= reach:
        padding = "SAME"
    if padding == "pad":
        pads = [(0, 0), (0, 0), (reach, 0), (reach, 0)] if first else [(0, 0), (reach, 0), (reach, 0), (0, 0)]
        x, padding = jnp.pad(x, pads), "VALID"
    elif padding == "odd":
        padding = [(reach, 1), (0, reach)]
    count = {"one": 1, "two": 2 if channels % 2 == features % 2 == 0 else 1, "depthwise": channels}[groups]
    features = features if features % count == 0 else channels
    w = scope.param(key, "w", size, size, channels // count, features, scale=1 / math.sqrt(size * size * channels // count))
    w = w.astype(x.dtype)
    names = ("NCHW", "OIHW", "NCHW") if first else ("NHWC", "HWIO", "NHWC")
    w = w.transpose(3, 2, 0, 1) if first else w
    y = lax.conv_general_dilated(x, w, (stride, stride), padding, rhs_dilation=(dilation, dilation), dimension_numbers=names,
                                 feature_group_count=count)
    if first != scope.first:
        y = jnp.moveaxis(y, *((1, -1) if first else (-1, 1)))
    y = y[0] if scope.mapped else y
    return biased(scope, y, key, bias)


@step(features=(4, 8, 16, 0, 0), bias=BIASES, spelling=("@", "@", "einsum", "dot", "transposed", "flattened"))
def dense(scope, x, key, features, bias, spelling):
    moved = scope.axis(x) != x.ndim - 1
    x = jnp.moveaxis(x, scope.axis(x), -1) if moved else x
    features = features or x.shape[-1]
    w = scope.param(key, "w", x.shape[-1], features, scale=1 / math.sqrt(x.shape[-1])).astype(x.dtype)
    if spelling == "einsum":
        y = jnp.einsum("...i,io->...o", x, w)
    elif spelling == "dot":
        y = lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))
    elif spelling == "transposed":
        y = x @ w.T.reshape(features, -1).T
    elif spelling == "flattened":
        y = (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], features)
    else:
        y = x @ w
    return biased(scope, jnp.moveaxis(y, -1, scope.axis(x) if not moved else scope.axis(y)) if moved else y, key, bias)


# --- norms -------------------------------------------------------------------------------------------------------


def moments(x, axes, spelling, name):
    """Mean and variance over some axes, and over the mapped axis `name`."""
    mean = functools.partial(jnp.mean, axis=axes, keepdims=True)
    shared = (lambda v: lax.pmean(mean(v), name)) if name else mean
    if spelling == "var" and not name:
        return mean(x), jnp.var(x, axis=axes, keepdims=True)
    if spelling == "squares":
        m = shared(x)
        return m, shared(x * x) - m * m
    if spelling == "clamped":
        m, squares = shared(x), shared(jnp.square(x))
        return m, jnp.maximum(squares - jnp.square(m), 0.0)
    if spelling == "sums" and not name:
        count = math.prod(x.shape[d] for d in axes)
        m = jnp.sum(x, axes, keepdims=True) / count
        return m, jnp.sum((x - m) ** 2, axes, keepdims=True) / count
    m = shared(x)
    return m, shared(jnp.square(x - m))


def normalised(x, mean, var, gamma, beta, spelling):
    if spelling == "folded":
        scale = lax.rsqrt(var + 1e-3) * (1.0 if gamma is None else gamma)
        return x * scale + ((0.0 if beta is None else beta) - mean * scale)
    if spelling == "sqrt":
        y = (x - mean) / jnp.sqrt(var + 1e-3)
    elif spelling == "gamma first" and gamma is not None:
        y, gamma = (x - mean) * (lax.rsqrt(var + 1e-3) * gamma), None
    elif spelling == "power":
        y = (x - mean) * (var + 1e-3) ** -0.5
    else:
        y = (x - mean) * lax.rsqrt(var + 1e-3)
    y = y if gamma is None else gamma * y
    return y if beta is None else y + beta


@step(kind=("batch", "batch", "batch", "given", "layer", "layer", "rms", "group", "instance"),
      statistics=("var", "squares", "clamped", "sums", "two passes"), parameters=("both", "both", "gamma", "beta", "none"),
      spelling=("plain", "folded", "sqrt", "gamma first", "power"), running=(False, True))
def norm(scope, x, key, kind, statistics, parameters, spelling, running):
    dtype, axis, batch = x.dtype, scope.axis(x), () if scope.mapped else (0,)
    x = wide(x)
    spatial = tuple(d for d in range(x.ndim) if d not in (*batch, axis))
    shape, channels = x.shape, scope.channels(x)
    gamma = scope.along(x, scope.param(key, "gamma", channels, offset=1.0)) if parameters in ("both", "gamma") else None
    beta = scope.along(x, scope.param(key, "beta", channels)) if parameters in ("both", "beta") else None
    if kind == "given":
        mean = scope.along(x, scope.param(key, "mean", channels))
        var = scope.along(x, jnp.abs(scope.param(key, "var", channels)) + 0.5)
    elif kind == "rms":
        mean, var = 0.0, jnp.mean(jnp.square(x), axis=axis, keepdims=True)
        x = x * lax.rsqrt(var + 1e-3)
        return (x if gamma is None else x * gamma).astype(dtype)
    elif kind == "group" and channels % 2 == 0:
        grouped = jnp.moveaxis(x, axis, -1)
        lead = grouped.shape
        grouped = grouped.reshape(*grouped.shape[:-1], 2, channels // 2)
        mean, var = moments(grouped, tuple(d for d in range(len(batch), grouped.ndim) if d != grouped.ndim - 2), statistics, None)
        grouped = (grouped - mean) * lax.rsqrt(var + 1e-3)
        x, mean, var, spelling = jnp.moveaxis(grouped.reshape(lead), -1, axis), 0.0, 1.0, "plain"
        assert x.shape == shape
    else:
        axes = dict(layer=(axis,), instance=spatial or (axis,)).get(kind, (*batch, *spatial))
        name = "batch" if scope.mapped and kind not in ("layer", "instance") else None
        if not axes:  # one vector of channels under vmap
            axes, name = (axis,), None
        mean, var = moments(x, axes, statistics, name)
        if running:
            scope.extras.append(jnp.mean(0.9 * mean) + jnp.mean(0.1 * var))
    return normalised(x, mean, var, gamma, beta, spelling).astype(dtype)


# --- activations -------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "relu": jax.nn.relu, "relu where": lambda x: jnp.where(x > 0, x, 0), "maximum": lambda x: jnp.maximum(x, 0),
    "relu6": jax.nn.relu6, "clip": lambda x: jnp.clip(x, 0, 6), "clip1": lambda x: jnp.clip(x, -1, 1),
    "leaky": jax.nn.leaky_relu, "leaky where": lambda x: jnp.where(x >= 0, x, 0.2 * x), "elu": jax.nn.elu,
    "selu": jax.nn.selu, "celu": lambda x: jax.nn.celu(x, 0.7), "gelu": jax.nn.gelu,
    "erf": lambda x: x * 0.5 * (1 + lax.erf(x / math.sqrt(2))), "silu": jax.nn.silu,
    "swish": lambda x: x / (1 + jnp.exp(-x)), "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "hard swish": lambda x: x * jnp.minimum(jnp.maximum(x + 3, 0), 6) / 6, "sigmoid": jax.nn.sigmoid, "tanh": jnp.tanh,
    "softplus": jax.nn.softplus, "relu squared": lambda x: jax.nn.relu(x) ** 2, "sin": jnp.sin, "abs": jnp.abs,
    "minus relu": lambda x: -jax.nn.relu(-x), "crelu": lambda x: jax.nn.relu(x) - 0.3 * jax.nn.relu(-x),
    "shifted relu": lambda x: jax.nn.relu(x + 0.5) - 0.5, "jitted relu": jax.jit(lambda x: jnp.maximum(x, 0)),
    "stopped": lambda x: jax.nn.relu(x) + lax.stop_gradient(x), "masked": lambda x: x * (x > 0),
}


@step(function=tuple(["relu"] * 8) + tuple(ACTIVATIONS))
def activation(scope, x, key, function):
    return ACTIVATIONS[function](x)


@step(function=("scale", "shift", "per channel", "minus", "divide", "clip gradient", "mask", "constant", "self", "barrier", "copy"))
def arithmetic(scope, x, key, function):
    if function == "clip gradient":
        return 2 * x - lax.stop_gradient(x)
    if function == "per channel":
        return x * scope.along(x, scope.param(key, "s", scope.channels(x), offset=1.0)).astype(x.dtype)
    if function == "mask":
        mask = np.random.default_rng(key).random(x.shape) < 0.8
        return jnp.where(mask, x / 0.8, 0)
    if function == "constant":
        return x + np.random.default_rng(key).normal(size=x.shape).astype(np.float32).astype(x.dtype)
    if function == "barrier":
        return lax.optimization_barrier(x)
    return dict(scale=lambda: 0.7 * x, shift=lambda: x + 0.1, minus=lambda: 0.2 - x, divide=lambda: x / 1.3,
                self=lambda: x * jax.nn.sigmoid(x.mean(-1, keepdims=True)), copy=lambda: x + 0)[function]()


# --- what changes the shape --------------------------------------------------------------------------------------


@step(kind=("max", "max", "average"), size=(2, 3), stride=(1, 2, 2), padding=("SAME", "VALID"))
def pool(scope, x, key, kind, size, stride, padding):
    if scope.rank(x) != 4:
        return x
    spatial = [d for d in range(x.ndim) if d not in (scope.axis(x), *([] if scope.mapped else [0]))]
    if min(x.shape[d] for d in spatial) < size:
        padding = "SAME"
    window = [size if d in spatial else 1 for d in range(x.ndim)]
    strides = [stride if d in spatial else 1 for d in range(x.ndim)]
    if kind == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)
    return lax.reduce_window(x, 0.0, lax.add, window, strides, padding) / size**2


@step(to=("mean", "flat", "tokens"))
def reshape(scope, x, key, to):
    if scope.rank(x) < 4:
        return x
    spatial = tuple(d for d in range(x.ndim) if d not in (scope.axis(x), *([] if scope.mapped else [0])))
    if to == "mean":
        return x.mean(spatial)
    if to == "flat":
        return x.reshape(-1) if scope.mapped else x.reshape(x.shape[0], -1)
    x = jnp.moveaxis(x, scope.axis(x), -1)
    return x.reshape(-1, x.shape[-1]) if scope.mapped else x.reshape(x.shape[0], -1, x.shape[-1])


@step(heads=(1, 2), masked=(False, True), spelling=("einsum", "jax.nn"))
def attention(scope, x, key, heads, masked, spelling):
    if scope.rank(x) != 3 or x.shape[-1] % heads:
        return x
    batched, width = x[None] if scope.mapped else x, x.shape[-1]
    q, k, v = (batched @ scope.param(key, name, width, width).astype(x.dtype) for name in "qkv")
    q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (q, k, v))
    if spelling == "jax.nn":
        y = jax.nn.dot_product_attention(q, k, v, is_causal=masked)
    else:
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[-1])
        if masked:
            scores = jnp.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -1e9)
        y = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores, -1), v)
    y = y.reshape(batched.shape)
    return y[0] if scope.mapped else y


@step(cell=("lstm", "gru", "rnn"))
def recurrent(scope, x, key, cell):
    if scope.rank(x) != 3:
        return x
    width, gates = x.shape[-1], dict(lstm=4, gru=3, rnn=1)[cell]
    w, u = (scope.param(key, name, width, gates * width).astype(x.dtype) for name in "wu")
    b = scope.param(key, "b", gates * width).astype(x.dtype)

    def advance(state, part):
        h, c = state
        if cell == "rnn":
            return (jnp.tanh(part @ w + h @ u + b), c), h
        if cell == "gru":
            (r, z, n), (ru, zu, nu) = (jnp.split(a, 3, -1) for a in (part @ w + b, h @ u))
            z = jax.nn.sigmoid(z + zu)
            h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + ru) * nu) + z * h
            return (h, c), h
        i, f, g, o = jnp.split(part @ w + h @ u + b, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    steps = jnp.moveaxis(x, -2, 0)
    return jnp.moveaxis(lax.scan(advance, (jnp.zeros_like(steps[0]),) * 2, steps)[1], 0, -2)


@step(how=("square", "mean", "relu", "returned", "channel"))
def read_again(scope, x, key, how):
    """The value has another reader: in the loss, or beyond the program."""
    if how == "returned" and not scope.mapped and not scope.prefix:
        scope.extras.append(x)
    elif how == "channel":
        scope.extras.append(jnp.mean(jnp.sin(wide(x).sum([d for d in range(x.ndim) if d != scope.axis(x)]))))
    else:
        scope.extras.append(jnp.mean(dict(square=jnp.square, mean=jnp.sin).get(how, jax.nn.relu)(wide(x))))
    return x
