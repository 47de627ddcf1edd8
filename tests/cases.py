"""The one table of named real shapes, small: what the op contract runs over. A new op or shape is a row here."""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from arrays import array
from jaxfuse import ops
from jaxfuse.ops.activations import TABLE as ACTIVATIONS
from unfused import UNFUSED

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
        types = {name: jnp.float32 if name in (*self.float32, *_STATISTICS) else dtype for name in self.shapes}
        return {name: array(_DRAW[name](rng, shape), types[name]) for name, shape in self.shapes.items()}

    def fused(self, arrays) -> tuple[jax.Array, ...]:
        """The outputs that depend on the arguments."""
        outs = getattr(ops, self.op)(**arrays, **self.options)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return outs[:1] if "mean" in arrays else outs

    def unfused(self, arrays) -> tuple[jax.Array, ...]:
        """The same as anybody would write it, in the precision of the arguments."""
        return UNFUSED[self.op](**arrays, **self.options)

    @property
    def module(self) -> str:
        """The file in `jaxfuse.ops` that defines the op."""
        return "norm" if self.op in ("layer_norm", "rms_norm", "group_norm") else self.op


def _normal(mean=0.0, deviation=1.0):
    return lambda rng, shape: mean + deviation * rng.normal(size=shape)


def _fan_in(times):
    return lambda rng, shape: rng.normal(size=shape) * times / math.sqrt(max(1, math.prod(shape[:-1])))


_DRAW = dict(
    x=_normal(0.5), w=_fan_in(2), scale=_normal(1, 0.3), gamma=_normal(2, 0.3), var=lambda rng, shape: rng.uniform(0.5, 2, size=shape),
    **dict.fromkeys(("bias", "residual", "beta", "mean", "bias_n", "h0", "c0"), _normal()),
    **dict.fromkeys(("w_x", "w_h"), _fan_in(1)), **dict.fromkeys("qkv", _normal(0.25)))
_STATISTICS = ("gamma", "beta", "mean", "var")  # float32 beside bfloat16 activations, as in Flax


def _with_terms(case, terms, per_channel=None):
    """With the other arguments, whose shapes follow from those of x and w; `per_channel`: that of one for each output."""
    types = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in case.shapes.items()}
    out = jax.eval_shape(lambda arrays: case.unfused(arrays)[0], types).shape
    channels = per_channel or (out[1 if case.options.get("dimension_numbers") == CHANNELS_FIRST else -1],)
    return dataclasses.replace(case, shapes=case.shapes | {term: out if term == "residual" else channels for term in terms.split()})


def conv(name, x, w, terms="", *, refused="", float32=(), **options):
    """A row: `terms` are the other arguments."""
    return _with_terms(Case(name, "conv", dict(x=x, w=w), options, refused, float32), terms)


def dense(name, x, w, terms="", *, refused="", float32=(), **options):
    (_, contracted), (_, batch) = options.get("dimension_numbers", (((), (0,)), ((), ())))
    features = tuple(n for d, n in enumerate(w) if d not in (*contracted, *batch))
    return _with_terms(Case(name, "dense", dict(x=x, w=w), options, refused, float32), terms, features)


def batch_norm(name, x, terms="", *, refused="", **options):
    channels = x[options.get("axis", -1)]
    terms = ["gamma", "beta", *terms.split()]
    shapes = {term: x if term == "residual" else (channels,) for term in terms}
    return Case(name, "batch_norm", dict(x=x) | shapes, options, refused)


def max_pool(name, x, window_shape, **options):
    return Case(name, "max_pool", dict(x=x), dict(window_shape=window_shape) | options)


def global_average_pool(name, x):
    return Case(name, "global_average_pool", dict(x=x))


def example(activation):
    return {"alpha": 0.3} if activation.has_alpha else {}


def norm(op, name, x, terms="", **options):
    channels = x[options.get("axis", -1)]
    terms = ["gamma", *["beta"] * (op != "rms_norm"), *terms.split()]
    shapes = {term: x if term == "residual" else (channels,) for term in terms}
    return Case(name, op, dict(x=x) | shapes, options)


def recurrent(op, name, x, hidden, terms="", *, float32=(), **options):
    """A row of lstm or gru: `terms` are the arguments that may be left out."""
    width, state = (4 if op == "lstm" else 3) * hidden, (x[1], hidden)
    shapes = dict(bias=(width,), bias_n=(hidden,), h0=state, c0=state)
    shapes = dict(x=x, w_x=(x[2], width), w_h=(hidden, width)) | {term: shapes[term] for term in terms.split()}
    return Case(name, op, shapes, options, float32=float32)


def attention(name, batch, rows, keys, heads, features, *, of_values=None, shared=None, bias=None, **options):
    shared = shared or heads
    shapes = dict(q=(batch, rows, heads, features), k=(batch, keys, shared, features), v=(batch, keys, shared, of_values or features))
    return Case(name, "attention", shapes | (dict(bias=bias) if bias else {}), options)


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
    conv("depthwise_5x5_residual", (2, 5, 7, 17), (5, 5, 1, 17), "bias residual", activation="relu", feature_group_count=17),
    conv("depthwise_dilated", (1, 9, 8, 6), (3, 3, 1, 6), "bias", activation="tanh", rhs_dilation=(2, 2),
         feature_group_count=6),
    conv("depthwise_causal_1d", (2, 12, 16), (4, 1, 16), "scale bias", activation="silu", padding=((3, 0),),
         feature_group_count=16),
    conv("odd_channels", (3, 4, 4, 7), (3, 3, 7, 13), "bias residual", activation="relu"),
    conv("1d", (2, 12, 8), (5, 8, 16), "bias", activation="tanh", window_strides=(2,)),
    conv("3d", (1, 4, 5, 4, 4), (3, 3, 3, 4, 8), "bias", activation="relu"),
    conv("channels_first", (2, 8, 5, 5), (12, 4, 3, 3), "bias residual", activation="tanh", feature_group_count=2,
         dimension_numbers=CHANNELS_FIRST),
    conv("scale", (2, 5, 5, 8), (1, 1, 8, 8), "scale"),
    conv("scale_bias_residual", (2, 5, 5, 8), (3, 3, 8, 8), "scale bias residual", activation="relu"),
    conv("float32_bias", (2, 5, 5, 8), (3, 3, 8, 8), "scale bias", activation="relu", float32=("scale", "bias")),
    conv("silu_residual", (2, 5, 5, 8), (3, 3, 8, 8), "bias residual", activation="silu"),
    conv("relu_then_residual", (2, 5, 5, 8), (3, 3, 8, 8), "bias residual", activation="relu", residual_last=True),
    conv("silu_then_residual", (2, 5, 5, 8), (1, 1, 8, 8), "scale bias residual", activation="silu", residual_last=True),
    conv("transposed_4x4_stride2", (2, 5, 5, 16), (4, 4, 16, 8), "bias", activation="tanh", lhs_dilation=(2, 2),
         padding=((2, 2), (2, 2))),
    conv("transposed_residual", (2, 5, 4, 8), (3, 3, 8, 16), "scale bias residual", activation="silu", lhs_dilation=(2, 1),
         padding=((1, 2), (2, -1))),
    conv("transposed_groups", (2, 4, 4, 12), (3, 3, 3, 8), "bias", lhs_dilation=(2, 2), padding=((2, 1), (1, 2)),
         feature_group_count=4),
    conv("transposed_depthwise", (2, 4, 4, 8), (4, 4, 1, 8), activation="gelu", lhs_dilation=(2, 2), padding=((2, 2), (2, 2)),
         feature_group_count=8),
    conv("transposed_stride_beyond_window", (2, 5, 8), (2, 8, 16), "bias", lhs_dilation=(3,), padding=((1, 2),)),
    conv("transposed_dilated", (1, 4, 4, 8), (3, 3, 8, 8), "bias", lhs_dilation=(2, 2), rhs_dilation=(2, 3),
         padding=((4, 4), (3, 5))),
    conv("transposed_3d", (1, 3, 3, 2, 8), (2, 3, 3, 8, 8), "bias", activation="relu", lhs_dilation=(2, 2, 2),
         padding=((1, 1), (2, 1), (1, 1))),
    conv("transposed_channels_first", (2, 8, 4, 4), (12, 8, 4, 4), "bias residual", activation="leaky_relu", alpha=0.2,
         lhs_dilation=(2, 2), padding=((2, 2), (2, 2)), dimension_numbers=CHANNELS_FIRST),
    conv("transposed_odd", (3, 3, 4, 5), (3, 2, 5, 9), "bias", lhs_dilation=(3, 2), padding=((2, 2), (1, 0))),
    conv("transposed_and_strided", (2, 6, 6, 8), (3, 3, 8, 8), "bias", lhs_dilation=(2, 2), window_strides=(2, 2),
         padding=((1, 1), (1, 1)), refused="window_strides (2, 2) with lhs_dilation"),
    conv("transposed_padded_beyond", (2, 4, 4, 8), (2, 2, 8, 8), lhs_dilation=(2, 2), padding=((2, 1), (1, 1)),
         refused="the filter reaches (1, 1) only"),
    conv("negative_padding", (2, 6, 6, 8), (3, 3, 8, 8), "bias", padding=((-1, 0), (0, 0)), refused="negative padding"),
    *[
        conv(f"activation_{name}", (2, 4, 4, 8), (1, 1, 8, 8), "bias", activation=name, **example(activation))
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
    *[
        batch_norm(f"{'residual_' if terms else ''}{name}", (4, 5, 5, 8), terms, activation=name, **example(activation))
        for name, activation in ACTIVATIONS.items()
        for terms in ("", "residual")
        if name not in ("none", "relu", "relu6", "maximum0")
    ],
    batch_norm("one_channel", (2, 5, 5, 1), "residual", activation="relu"),
    batch_norm("many_channels_rank2", (10, 67), "residual", activation="relu", epsilon=1e-3),
    batch_norm("rank3", (2, 9, 8), activation="relu"),
    batch_norm("rank5", (2, 2, 3, 3, 8), "residual", activation="relu"),
    batch_norm("channels_first", (4, 6, 5, 5), "residual", activation="relu", axis=1, refused="channel axis 1"),
    batch_norm("channel_axis_0", (6, 4, 5), activation="relu", axis=0, refused="channel axis 0"),
    batch_norm("given_statistics", (2, 5, 5, 16), "mean var", activation="relu"),
    batch_norm("given_statistics_residual", (2, 5, 5, 16), "residual mean var", activation="relu6"),
]

DENSE = [
    dense("alone", (12, 16), (16, 24)),
    dense("three_axes_bias_gelu", (2, 5, 16), (16, 24), "bias", activation="gelu"),
    dense("bias_residual", (2, 5, 16), (16, 8), "bias residual"),
    dense("residual_tanh", (6, 16), (16, 8), "residual", activation="tanh"),
    dense("bias_residual_silu", (2, 5, 16), (16, 8), "bias residual", activation="silu"),
    dense("odd_sizes_relu", (7, 13), (13, 5), "bias", activation="relu"),
    dense("one_row", (1, 16), (16, 24), "bias", activation="relu"),
    dense("one_column", (6, 16), (16, 1), "bias"),
    dense("one_input", (6, 1), (1, 9), "bias", activation="gelu_tanh"),
    dense("vector", (16,), (16, 8), "bias", activation="tanh"),
    dense("long_sum", (9, 2100), (2100, 16), "bias", activation="relu"),
    dense("many_rows", (1500, 8), (8, 8), "bias", activation="gelu"),
    dense("many_columns", (70, 8), (8, 5000), "bias", activation="gelu"),
    dense("transposed_weight", (2, 5, 16), (24, 16), "bias", dimension_numbers=(((2,), (1,)), ((), ()))),
    dense("transposed_input", (16, 6), (16, 24), "bias", activation="relu", dimension_numbers=(((0,), (0,)), ((), ()))),
    dense("heads", (2, 5, 16), (16, 3, 8), "bias", activation="relu"),
    dense("heads_contracted", (2, 5, 3, 8), (3, 8, 16), "bias", dimension_numbers=(((2, 3), (0, 1)), ((), ()))),
    dense("batched", (4, 6, 16), (4, 16, 8), "residual", activation="relu", dimension_numbers=(((2,), (1,)), ((0,), (0,)))),
    dense("attention_scores", (2, 6, 3, 8), (2, 7, 3, 8), dimension_numbers=(((3,), (3,)), ((0, 2), (0, 2)))),
    dense("attention_values", (2, 3, 6, 7), (2, 7, 3, 8), dimension_numbers=(((3,), (1,)), ((0, 1), (0, 2)))),
    dense("float32_result", (2, 5, 16), (16, 8), "bias residual", activation="gelu", float32=("bias", "residual"),
          preferred_element_type=jnp.float32),
    dense("contracted_axes_apart", (3, 4, 8), (3, 8, 5), "bias", dimension_numbers=(((0, 2), (0, 1)), ((), ())),
          refused="axes (0, 2) of x, of shape (3, 4, 8), do not lie one after the other"),
    dense("batch_axis_last", (6, 16, 4), (16, 8, 4), dimension_numbers=(((1,), (0,)), ((2,), (2,))),
          refused="the last axis of x, of shape (6, 16, 4), is a batch axis"),
    *[
        dense(f"activation_{name}", (6, 16), (16, 24), "bias", activation=name, **example(activation))
        for name, activation in ACTIVATIONS.items()
        if name != "none"
    ],
]

MAX_POOL = [
    max_pool("3x3_stride2", (2, 9, 9, 16), (3, 3), strides=(2, 2), padding="SAME"),
    max_pool("3x3_overlapping", (2, 6, 5, 8), (3, 3), padding=((1, 1), (1, 1))),
    max_pool("2x2_stride2", (2, 6, 6, 13), (2, 2), strides=(2, 2)),
    max_pool("1d", (2, 9, 8), (3,), strides=(2,)),
    max_pool("3d_asymmetric", (1, 4, 5, 4, 8), (2, 3, 2), strides=(2, 1, 2), padding=((0, 1), (1, 1), (0, 0))),
]

GLOBAL_AVERAGE_POOL = [
    global_average_pool("images", (2, 5, 7, 13)),
    global_average_pool("many_places", (1, 90, 70, 24)),
    global_average_pool("many_channels", (2, 3, 3, 1030)),
    global_average_pool("tokens", (3, 9, 16)),
    global_average_pool("one_place", (2, 1, 1, 1, 5)),
]

NORM = [
    norm("layer_norm", "tokens", (2, 5, 24)),
    norm("layer_norm", "residual", (2, 5, 24), "residual"),
    norm("layer_norm", "residual_sum_gelu", (2, 5, 24), "residual", activation="gelu", return_sum=True),
    norm("layer_norm", "relu", (3, 4, 19), activation="relu"),
    norm("layer_norm", "long_rows", (2, 5000), "residual", return_sum=True, epsilon=1e-3),
    norm("layer_norm", "many_rows", (2300, 6)),
    norm("layer_norm", "vector", (24,), activation="silu"),
    norm("rms_norm", "tokens", (2, 3, 32)),
    norm("rms_norm", "residual_sum_silu", (2, 5, 24), "residual", activation="silu", return_sum=True),
    norm("group_norm", "images_silu", (2, 5, 5, 16), groups=4, activation="silu"),
    norm("group_norm", "odd", (2, 3, 7, 15), groups=3),
    norm("group_norm", "one_image", (1, 9, 9, 128), groups=32, activation="silu"),
    norm("group_norm", "many_places", (2, 700, 8), groups=2),
    norm("group_norm", "channels_first_relu", (2, 16, 3, 5), groups=4, activation="relu", axis=1),
    norm("group_norm", "instance", (2, 5, 5, 13), groups=13),
    norm("group_norm", "instance_channels_first", (2, 13, 5, 5), groups=13, axis=1, activation="softplus"),
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

LATER = ~np.tril(np.ones((9, 9), bool), 2)
ATTENTION = [
    attention("plain", 2, 6, 7, 3, 8),
    attention("one_row", 2, 1, 9, 2, 4),
    attention("two_keys", 1, 5, 2, 2, 4),
    attention("odd_sizes_scale", 1, 13, 19, 3, 5, of_values=11, scale=-0.7),
    attention("many_rows", 1, 300, 9, 1, 3),
    attention("many_keys", 1, 7, 600, 1, 6),
    attention("many_of_both", 1, 130, 270, 2, 8, bias=(270,)),
    attention("bias", 2, 6, 7, 3, 8, bias=(2, 3, 6, 7)),
    attention("bias_of_heads", 2, 6, 7, 3, 8, bias=(3, 6, 7)),
    attention("causal", 2, 9, 9, 3, 8, mask=~LATER),
    attention("bias_and_mask_of_items", 2, 9, 7, 3, 8, bias=(1, 3, 1, 7), mask=np.arange(14).reshape(2, 1, 1, 7) % 5 > 0),
    attention("dropout", 2, 6, 7, 3, 8, factor=np.float32(np.arange(252).reshape(2, 3, 6, 7) % 4 > 0) / 0.75),
    attention("dropout_of_many", 1, 20, 300, 2, 6, mask=np.arange(300) % 7 > 0, factor=np.float32(np.arange(6000).reshape(20, 300) % 3)),
    attention("factor_of_rows", 1, 6, 5, 2, 4, bias=(6, 5), factor=np.linspace(-1, 1, 6, dtype=np.float32)[:, None]),
    attention("whole_rows_masked", 1, 9, 9, 2, 8, mask=np.arange(9)[:, None] % 3 > 0),
    attention("grouped", 2, 6, 7, 6, 8, shared=2, bias=(6, 6, 7)),
    attention("one_shared_head", 1, 5, 9, 4, 8, shared=1, mask=LATER[:5] | LATER[:5, ::-1]),
]

CASES = {f"{case.op}-{case.name}": case for case in (*CONV, *BATCH_NORM, *DENSE, *MAX_POOL, *GLOBAL_AVERAGE_POOL, *NORM, *RECURRENT,
                                                    *ATTENTION)}

# One of each kind of rule behind autodiff and batching; the transformations run over these.
CORE = [
    "conv-3x3_stride2_asymmetric",  # relu from y, residual
    "conv-channels_first",  # activation that curves
    "conv-transposed_4x4_stride2",
    "conv-scale_bias_residual",  # differentiated as several ops
    "conv-silu_then_residual",  # what the activation is applied to is kept
    "batch_norm-residual_relu",  # mask bits, batch statistics
    "batch_norm-relu6",  # recomputed sign
    "batch_norm-residual_gelu",  # recomputed with the residual
    "batch_norm-given_statistics",
    "dense-residual_tanh",  # from y
    "dense-bias_residual_silu",  # from what the activation was applied to
    "dense-batched",
    "max_pool-3x3_overlapping",
    "global_average_pool-images",  # nothing is kept
    "layer_norm-residual_sum_gelu",  # two outputs, two equal gradients
    "group_norm-channels_first_relu",  # repeated parameters
    "group_norm-images_silu",
    "lstm-sequence",
    "gru-sequence",
    "gru-resets_first",
    "attention-bias_and_mask_of_items",
    "attention-grouped",
]
