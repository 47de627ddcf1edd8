"""The one table of named real shapes, small: what the op contract runs over. A new op or shape is a row here."""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse import ops
from jaxfuse.ops.activations import TABLE as ACTIVATIONS

CHANNELS_FIRST = ("NCHW", "OIHW", "NCHW")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `jaxfuse.ops.<op>` on arguments of these shapes.

    `refused` is a part of the sentence with which the kernel refuses the case; empty: the kernel takes it.
    `float32` names the arguments that are float32 whatever the dtype of the others.
    """

    name: str
    op: str
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(hash=False)
    options: dict = dataclasses.field(default_factory=dict, hash=False)
    refused: str = ""
    float32: tuple[str, ...] = ()

    def inputs(self, dtype="float32", seed=0) -> dict[str, jax.Array]:
        """Numbers like those of a real layer: a mean away from 0, and outputs on both sides of every kink."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), seed])
        arrays = {}
        for name, shape in self.shapes.items():
            draw, vector = _DRAW[name], jnp.float32 if name in (*self.float32, *_STATISTICS) else dtype
            arrays[name] = jnp.asarray(draw(rng, shape), vector)
        return arrays

    def fused(self, arrays) -> tuple[jax.Array, ...]:
        """The outputs that depend on the arguments."""
        outs = getattr(ops, self.op)(**arrays, **self.options)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return outs[:1] if "mean" in arrays else outs

    def unfused(self, arrays) -> tuple[jax.Array, ...]:
        """The same as anybody would write it, in the precision of the arguments."""
        return _UNFUSED[self.op](**arrays, **self.options)


def _fan_in(rng, shape):
    return rng.normal(size=shape) * 2 / math.sqrt(max(1, math.prod(shape[:-1])))


_DRAW = dict(
    x=lambda rng, shape: rng.normal(size=shape) + 0.5,
    w=_fan_in,
    bias=lambda rng, shape: rng.normal(size=shape),
    residual=lambda rng, shape: rng.normal(size=shape),
    scale=lambda rng, shape: 1 + 0.3 * rng.normal(size=shape),
    gamma=lambda rng, shape: 2 + 0.3 * rng.normal(size=shape),
    beta=lambda rng, shape: rng.normal(size=shape),
    mean=lambda rng, shape: rng.normal(size=shape),
    var=lambda rng, shape: rng.uniform(0.5, 2, size=shape),
)
for _name in ("w_x", "w_h"):
    _DRAW[_name] = lambda rng, shape: _fan_in(rng, shape) / 2
for _name in ("bias_n", "h0", "c0"):
    _DRAW[_name] = _DRAW["bias"]
_STATISTICS = ("gamma", "beta", "mean", "var")  # float32 beside bfloat16 activations, as in Flax


def _conv(x, w, bias=None, residual=None, *, scale=None, activation=None, alpha=0.0, window_strides=None,
          padding="SAME", rhs_dilation=None, feature_group_count=1, dimension_numbers=None):
    spatial = x.ndim - 2
    letters = "DHW"[3 - spatial :]
    names = dimension_numbers or (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    y = lax.conv_general_dilated(
        x, w, window_strides or (1,) * spatial, padding, rhs_dilation=rhs_dilation, dimension_numbers=names,
        feature_group_count=feature_group_count)
    per_channel = [-1 if letter == "C" else 1 for letter in names[2]]
    if scale is not None:
        y = y * scale.reshape(per_channel).astype(y.dtype)
    if bias is not None:
        y = y + bias.reshape(per_channel).astype(y.dtype)
    if residual is not None:
        y = y + residual
    return (ACTIVATIONS[activation or "none"].value(y, alpha),)


def _batch_norm(x, gamma, beta, residual=None, *, activation=None, epsilon=1e-5, axis=-1, mean=None, var=None):
    """As Flax does it: statistics and arithmetic in at least float32, add and activation in x's dtype."""
    others = [d for d in range(x.ndim) if d != axis % x.ndim]
    wide, statistics = x.astype(jnp.promote_types(x.dtype, jnp.float32)), ()
    if mean is None:
        mean, var = wide.mean(others), wide.var(others)
        statistics = mean, var
    mean, scale, beta = [jnp.expand_dims(v, others) for v in (mean, gamma * lax.rsqrt(var + epsilon), beta)]
    y = ((wide - mean) * scale + beta).astype(x.dtype)
    if residual is not None:
        y = y + residual
    return ACTIVATIONS[activation or "none"].value(y, 0.0), *statistics


def _max_pool(x, *, window_shape, strides=None, padding="VALID"):
    whole = lambda sizes: (1, *sizes, 1)  # noqa: E731
    if not isinstance(padding, str):
        padding = ((0, 0), *padding, (0, 0))
    strides = strides or (1,) * len(window_shape)
    return (lax.reduce_window(x, -jnp.inf, lax.max, whole(window_shape), whole(strides), padding),)


def _gates(x, h, w_x, w_h, bias, order, forget_bias=0.0):
    z = dict(zip(order, jnp.split(x @ w_x + (0 if h is None else h @ w_h) + (0 if bias is None else bias), len(order), -1)))
    return z | ({"f": z["f"] + jnp.asarray(forget_bias, x.dtype)} if "f" in z else {})


def _lstm(x, w_x, w_h, bias=None, h0=None, c0=None, *, gate_order="ifgo", forget_bias=0.0, reverse=False):
    def step(state, x):
        h, c = state
        z = _gates(x, h.astype(x.dtype), w_x, w_h, bias, gate_order, forget_bias)
        c = (jax.nn.sigmoid(z["f"]) * c + jax.nn.sigmoid(z["i"]) * jnp.tanh(z["g"])).astype(c.dtype)
        h = (jax.nn.sigmoid(z["o"]) * jnp.tanh(c)).astype(h.dtype)
        return (h, c), h

    zeros = jnp.zeros((x.shape[1], w_h.shape[0]), x.dtype)
    (h, c), hs = lax.scan(step, (zeros if h0 is None else h0, zeros if c0 is None else c0), x, reverse=reverse)
    return hs, h, c


def _gru(x, w_x, w_h, bias=None, bias_n=None, h0=None, *, gate_order="rzn", reset_after=True, reverse=False):
    def step(h, x):
        low = h.astype(x.dtype)
        given = _gates(x, None, w_x, w_h, bias, gate_order)
        w = dict(zip(gate_order, jnp.split(w_h, 3, -1)))
        r, z = (jax.nn.sigmoid(given[gate] + low @ w[gate]) for gate in "rz")
        inner = low @ w["n"] + (0 if bias_n is None else bias_n)
        n = jnp.tanh(given["n"] + (r * inner if reset_after else (r * h).astype(x.dtype) @ w["n"]))
        h = ((1 - z) * n + z * h).astype(h.dtype)
        return h, h

    h0 = jnp.zeros((x.shape[1], w_h.shape[0]), x.dtype) if h0 is None else h0
    h, hs = lax.scan(step, h0, x, reverse=reverse)
    return hs, h


_UNFUSED = dict(conv=_conv, batch_norm=_batch_norm, max_pool=_max_pool, lstm=_lstm, gru=_gru)


def conv(name, x, w, terms="", *, refused="", float32=(), **options):
    """A row: `terms` are the other arguments, their shapes follow from x and w."""
    case = Case(name, "conv", dict(x=x, w=w), options, refused, float32)
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, w)]
    out = jax.eval_shape(lambda x, w: case.unfused(dict(x=x, w=w))[0], *types).shape
    features = out[1 if options.get("dimension_numbers") == CHANNELS_FIRST else -1]
    shapes = {term: out if term == "residual" else (features,) for term in terms.split()}
    return dataclasses.replace(case, shapes=case.shapes | shapes)


def batch_norm(name, x, terms="", *, refused="", **options):
    channels = x[options.get("axis", -1)]
    terms = ["gamma", "beta", *terms.split()]
    shapes = {term: x if term == "residual" else (channels,) for term in terms}
    return Case(name, "batch_norm", dict(x=x) | shapes, options, refused)


def max_pool(name, x, window_shape, **options):
    return Case(name, "max_pool", dict(x=x), dict(window_shape=window_shape) | options)


def recurrent(op, name, x, hidden, terms="", *, float32=(), **options):
    """A row of lstm or gru: `terms` are the arguments that may be left out."""
    width, state = (4 if op == "lstm" else 3) * hidden, (x[1], hidden)
    shapes = dict(bias=(width,), bias_n=(hidden,), h0=state, c0=state)
    shapes = dict(x=x, w_x=(x[2], width), w_h=(hidden, width)) | {term: shapes[term] for term in terms.split()}
    return Case(name, op, shapes, options, float32=float32)


CONV = [
    conv("3x3", (2, 6, 6, 16), (3, 3, 16, 8), "bias", activation="relu"),
    conv("3x3_alone", (2, 5, 7, 3), (3, 3, 3, 8)),
    conv("3x3_residual", (2, 5, 5, 8), (3, 3, 8, 8), "bias residual", activation="relu"),
    conv("1x1_residual_only", (2, 5, 5, 16), (1, 1, 16, 24), "residual", activation="relu"),
    conv("1x1_stride2", (2, 6, 6, 16), (1, 1, 16, 32), "bias", window_strides=(2, 2)),
    conv("stem_7x7_stride2", (1, 18, 18, 3), (7, 7, 3, 16), "bias", activation="relu", window_strides=(2, 2),
         padding=((3, 3), (3, 3))),
    conv("3x3_stride2_asymmetric", (2, 8, 8, 8), (3, 3, 8, 16), "bias residual", activation="relu",
         window_strides=(2, 2), padding=((0, 1), (0, 1))),
    conv("3x3_valid_strides_1_2", (2, 6, 9, 8), (3, 3, 8, 8), "bias", window_strides=(1, 2), padding="VALID"),
    conv("3x3_dilated", (1, 9, 9, 8), (3, 3, 8, 8), "bias", activation="relu", rhs_dilation=(2, 2)),
    conv("3x3_padded_beyond_window", (1, 4, 4, 3), (3, 3, 3, 5), "bias", padding=((4, 3), (0, 5))),
    conv("groups_4", (2, 6, 6, 32), (3, 3, 8, 32), "bias", activation="relu", feature_group_count=4),
    conv("depthwise", (2, 6, 6, 24), (3, 3, 1, 24), "bias", activation="relu6", feature_group_count=24),
    conv("depthwise_7x7", (1, 8, 8, 16), (7, 7, 1, 16), "bias", feature_group_count=16),
    conv("depthwise_multiplier_2_stride2", (2, 6, 6, 5), (3, 3, 1, 10), "bias", feature_group_count=5,
         window_strides=(2, 2)),
    conv("odd_channels", (3, 4, 4, 7), (3, 3, 7, 13), "bias residual", activation="relu"),
    conv("1d", (2, 12, 8), (5, 8, 16), "bias", activation="tanh", window_strides=(2,)),
    conv("3d", (1, 4, 5, 4, 4), (3, 3, 3, 4, 8), "bias", activation="relu"),
    conv("channels_first", (2, 8, 5, 5), (12, 4, 3, 3), "bias residual", activation="tanh", feature_group_count=2,
         dimension_numbers=CHANNELS_FIRST),
    conv("scale", (2, 5, 5, 8), (1, 1, 8, 8), "scale"),
    conv("scale_bias_residual", (2, 5, 5, 8), (3, 3, 8, 8), "scale bias residual", activation="relu"),
    conv("float32_bias", (2, 5, 5, 8), (3, 3, 8, 8), "scale bias", activation="relu", float32=("scale", "bias")),
    conv("silu_residual", (2, 5, 5, 8), (3, 3, 8, 8), "bias residual", activation="silu"),
    conv("negative_padding", (2, 6, 6, 8), (3, 3, 8, 8), "bias", padding=((-1, 0), (0, 0)), refused="negative padding"),
    *[
        conv(f"activation_{name}", (2, 4, 4, 8), (1, 1, 8, 8), "bias", activation=name,
             **{"alpha": 0.3} if activation.has_alpha else {})
        for name, activation in ACTIVATIONS.items()
        if name != "none"
    ],
]  # fmt: skip

BATCH_NORM = [
    batch_norm("relu", (4, 5, 5, 16), activation="relu"),
    batch_norm("alone", (4, 5, 5, 16)),
    batch_norm("residual_relu", (4, 5, 5, 16), "residual", activation="relu"),
    batch_norm("residual", (4, 5, 5, 16), "residual"),
    batch_norm("odd_channels_residual_relu6", (3, 3, 3, 13), "residual", activation="relu6"),
    batch_norm("relu6", (3, 3, 3, 13), activation="relu6"),
    batch_norm("maximum0", (4, 5, 5, 16), activation="maximum0"),
    batch_norm("residual_maximum0", (4, 5, 5, 16), "residual", activation="maximum0"),
    batch_norm("residual_silu", (4, 5, 5, 8), "residual", activation="silu"),
    batch_norm("one_channel", (2, 5, 5, 1), "residual", activation="relu"),
    batch_norm("many_channels_rank2", (10, 67), "residual", activation="relu", epsilon=1e-3),
    batch_norm("rank3", (2, 9, 8), activation="relu"),
    batch_norm("rank5", (2, 2, 3, 3, 8), "residual", activation="relu"),
    batch_norm("channels_first", (4, 6, 5, 5), "residual", activation="relu", axis=1, refused="channel axis 1"),
    batch_norm("channel_axis_0", (6, 4, 5), activation="relu", axis=0, refused="channel axis 0"),
    batch_norm("given_statistics", (2, 5, 5, 16), "mean var", activation="relu"),
    batch_norm("given_statistics_residual", (2, 5, 5, 16), "residual mean var", activation="relu6"),
]

MAX_POOL = [
    max_pool("3x3_stride2", (2, 9, 9, 16), (3, 3), strides=(2, 2), padding="SAME"),
    max_pool("3x3_overlapping", (2, 6, 5, 8), (3, 3), padding=((1, 1), (1, 1))),
    max_pool("2x2_stride2", (2, 6, 6, 13), (2, 2), strides=(2, 2)),
    max_pool("1d", (2, 9, 8), (3,), strides=(2,)),
    max_pool("3d_asymmetric", (1, 4, 5, 4, 8), (2, 3, 2), strides=(2, 1, 2), padding=((0, 1), (1, 1), (0, 0))),
]

RECURRENT = [
    recurrent("lstm", "sequence", (5, 3, 4), 16, "bias h0 c0"),
    recurrent("lstm", "cell", (1, 2, 5), 28, "bias h0 c0"),
    recurrent("lstm", "plain_odd_reverse", (4, 9, 3), 13, reverse=True),
    recurrent("lstm", "two_threads", (3, 24, 8), 80, "bias"),
    recurrent("lstm", "igfo_forget_bias", (3, 2, 4), 16, "bias", gate_order="igfo", forget_bias=1.0),
    recurrent("lstm", "float32_state", (3, 2, 4), 16, "bias h0 c0", float32=("h0", "c0")),
    recurrent("gru", "sequence", (5, 3, 4), 16, "bias bias_n h0"),
    recurrent("gru", "cell", (1, 2, 5), 28, "bias bias_n h0"),
    recurrent("gru", "plain_odd_reverse", (4, 9, 3), 13, reverse=True),
    recurrent("gru", "resets_first", (5, 3, 4), 16, "bias h0", reset_after=False),
    recurrent("gru", "resets_first_two_threads", (3, 24, 8), 80, "bias h0", reset_after=False, reverse=True),
    recurrent("gru", "two_threads_zrn", (3, 24, 8), 80, "bias bias_n", gate_order="zrn"),
]

CASES = {f"{case.op}-{case.name}": case for case in (*CONV, *BATCH_NORM, *MAX_POOL, *RECURRENT)}

# One of each kind of rule behind autodiff and batching; the transformations run over these.
CORE = [
    "conv-3x3_stride2_asymmetric",  # relu from y, residual
    "conv-channels_first",  # activation that curves
    "conv-scale_bias_residual",  # differentiated as several ops
    "batch_norm-residual_relu",  # mask bits, batch statistics
    "batch_norm-relu6",  # recomputed sign
    "batch_norm-given_statistics",
    "max_pool-3x3_overlapping",
    "lstm-sequence",
    "gru-sequence",
    "gru-resets_first",
]
