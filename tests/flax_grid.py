"""Options of Flax's layers: every combination that a drop-in must compute as Flax does, in both halves of Flax where both
have the option."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


class Option(NamedTuple):
    """One layer: its class in linen ("Dense" is "Linear" in nnx), the input's shape, the features out, the arguments."""

    layer: str
    shape: tuple[int, ...]
    features: int | None = None
    arguments: dict[str, Any] = {}
    epilogue: str = ""  # of "add" and an activation, joined by "+"
    call: dict[str, Any] = {}  # arguments of the call


IMAGE = (2, 16, 16, 8)
TOKENS = (4, 32, 64)
MASK = jnp.asarray(jax.random.bernoulli(jax.random.key(5), 0.7, (3, 3, 8, 16)), jnp.float32)

PLACES = jnp.asarray(jax.random.bernoulli(jax.random.key(6), 0.7, (2, 16, 16, 1)))
RANDOM = {"scale_init": nn.initializers.normal(1.0), "bias_init": nn.initializers.normal(1.0)}


def to_bf16(*args, dtype=None, inexact=True):
    """Another `promote_dtype`; linen gives it the arrays one by one, nnx as a tuple."""
    arrays = args[0] if isinstance(args[0], tuple) else args
    return tuple(a if a is None else a.astype(jnp.bfloat16) for a in arrays)


def narrow_product(a, b, dimensions, precision=None, **_):
    """Another `dot_general`."""
    return jax.lax.dot_general(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), dimensions).astype(a.dtype)


def conv(epilogue="", shape=IMAGE, features=16, layer="Conv", **arguments):
    return Option(layer, shape, features, {"kernel_size": (3, 3), **arguments}, epilogue)


GRID = {
    "conv": conv(),
    "conv relu": conv("relu"),
    "conv add relu": conv("add+relu"),
    "conv gelu": conv("gelu"),
    "conv strides": conv("relu", strides=2),
    "conv valid": conv("relu", padding="VALID"),
    "conv asymmetric": conv("relu", padding=((1, 2), (0, 1))),
    "conv one number": conv("relu", padding=2),
    "conv circular": conv("relu", padding="CIRCULAR"),
    "conv reflect": conv("relu", padding="REFLECT"),
    "conv causal": conv("relu", shape=(4, 64, 16), kernel_size=(4,), padding="CAUSAL"),
    "conv 3-D": conv("relu", shape=(2, 6, 6, 6, 4), kernel_size=(3, 3, 3)),
    "conv input dilation": conv("relu", input_dilation=2, padding=1),
    "conv kernel dilation": conv("relu", kernel_dilation=(1, 2)),
    "conv groups": conv("relu", feature_group_count=4),
    "conv depthwise": conv("relu", features=8, feature_group_count=8),
    "conv no bias": conv("relu", use_bias=False),
    "conv mask": conv("relu", mask=MASK),
    "conv bf16": conv("add+relu", dtype=jnp.bfloat16),
    "conv bf16 parameters": conv("relu", param_dtype=jnp.bfloat16),
    "conv precision": conv("relu", precision="highest"),
    "conv no batch": conv("relu", shape=(16, 16, 8)),
    "conv two batches": conv("relu", shape=(2, 2, 16, 16, 8)),
    "conv empty batch": conv("relu", shape=(0, 16, 16, 8)),
    "conv promoted": conv("relu", promote_dtype=to_bf16),
    "conv element type": conv("relu", dtype=jnp.bfloat16, preferred_element_type=jnp.float32),
    "conv initialisers": conv("add+relu", kernel_init=nn.initializers.normal(0.1), bias_init=nn.initializers.ones),
    "transpose": conv(layer="ConvTranspose"),
    "transpose strides relu": conv("relu", layer="ConvTranspose", strides=(2, 2)),
    "transpose valid": conv("relu", layer="ConvTranspose", strides=(2, 2), padding="VALID"),
    "transpose bf16": conv("add+relu", layer="ConvTranspose", strides=(2, 2), dtype=jnp.bfloat16),
    "transpose bf16 parameters": conv(layer="ConvTranspose", param_dtype=jnp.bfloat16, use_bias=False),
    "transpose options": conv("relu", layer="ConvTranspose", kernel_dilation=(1, 2), mask=MASK, precision="highest"),
    "transpose kernel": conv("gelu", layer="ConvTranspose", strides=(2, 2), transpose_kernel=True),
    "transpose promoted": conv("relu", layer="ConvTranspose", promote_dtype=to_bf16),
    "dense": Option("Dense", TOKENS, 128),
    "dense gelu": Option("Dense", TOKENS, 128, {}, "gelu"),
    "dense add": Option("Dense", TOKENS, 128, {}, "add"),
    "dense no bias": Option("Dense", TOKENS, 128, {"use_bias": False}, "relu"),
    "dense bf16": Option("Dense", TOKENS, 128, {"dtype": jnp.bfloat16}, "relu"),
    "dense vector": Option("Dense", (64,), 128, {}, "relu"),
    "dense bf16 parameters": Option("Dense", TOKENS, 128, {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}, "gelu"),
    "dense precision": Option("Dense", TOKENS, 128, {"precision": "highest"}, "relu"),
    "dense promoted": Option("Dense", TOKENS, 128, {"promote_dtype": to_bf16}, "add"),
    "dense own product": Option("Dense", TOKENS, 128, {"dot_general": narrow_product}, "relu"),
    "batch norm": Option("BatchNorm", IMAGE),
    "batch norm relu": Option("BatchNorm", IMAGE, None, {}, "relu"),
    "batch norm add relu": Option("BatchNorm", IMAGE, None, {}, "add+relu"),
    "batch norm options": Option("BatchNorm", IMAGE, None, {"momentum": 0.7, "epsilon": 1e-3}, "relu"),
    "batch norm axis": Option("BatchNorm", (4, 8, 10, 10), None, {"axis": 1}, "relu"),
    "batch norm no scale": Option("BatchNorm", IMAGE, None, {"use_scale": False}, "relu"),
    "batch norm no bias": Option("BatchNorm", IMAGE, None, {"use_bias": False}, "relu"),
    "batch norm slow variance": Option("BatchNorm", IMAGE, None, {"use_fast_variance": False}, "relu"),
    "batch norm bf16": Option("BatchNorm", IMAGE, None, {"dtype": jnp.bfloat16}, "add+relu"),
    "batch norm running": Option("BatchNorm", IMAGE, None, {"use_running_average": True}, "relu"),
    "batch norm running, by call": Option("BatchNorm", IMAGE, None, {}, "relu", {"use_running_average": True}),
    "batch norm initialisers": Option("BatchNorm", IMAGE, None, RANDOM, "add+relu"),
    "batch norm bf16 parameters": Option("BatchNorm", IMAGE, None, {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}, "relu"),
    "batch norm mask": Option("BatchNorm", IMAGE, None, {}, "relu", {"mask": PLACES}),
    "batch norm promoted": Option("BatchNorm", IMAGE, None, {"promote_dtype": to_bf16}, "relu"),
    "layer norm": Option("LayerNorm", TOKENS),
    "layer norm initialisers": Option("LayerNorm", TOKENS, None, RANDOM, "add+gelu"),
    "layer norm mask": Option("LayerNorm", IMAGE, None, {}, "", {"mask": PLACES}),
    "layer norm promoted": Option("LayerNorm", TOKENS, None, {"promote_dtype": to_bf16}),
    "layer norm narrow sums": Option("LayerNorm", TOKENS, None, {"dtype": jnp.bfloat16, "force_float32_reductions": False}),
    "layer norm options": Option("LayerNorm", TOKENS, None, {"epsilon": 1e-3, "use_bias": False}, "gelu"),
    "layer norm two axes": Option("LayerNorm", TOKENS, None, {"reduction_axes": (1, 2), "feature_axes": -1}),
    "layer norm bf16": Option("LayerNorm", TOKENS, None, {"dtype": jnp.bfloat16}),
    "rms norm": Option("RMSNorm", TOKENS),
    "rms norm no scale": Option("RMSNorm", TOKENS, None, {"use_scale": False}, "relu"),
    "rms norm bf16": Option("RMSNorm", TOKENS, None, {"dtype": jnp.bfloat16}, "silu"),
    "rms norm options": Option("RMSNorm", TOKENS, None, {"epsilon": 1e-3, "scale_init": nn.initializers.normal(1.0)}, "add"),
    "group norm": Option("GroupNorm", IMAGE, None, {"num_groups": 4}, "silu"),
    "group norm size": Option("GroupNorm", IMAGE, None, {"num_groups": None, "group_size": 2}),
    "group norm bf16": Option("GroupNorm", IMAGE, None, {"num_groups": 4, "dtype": jnp.bfloat16}, "silu"),
    "group norm options": Option("GroupNorm", IMAGE, None, {"num_groups": 2, "epsilon": 1e-3, **RANDOM}, "add+relu"),
}
BF16 = {name for name, option in GRID.items()
        if {jnp.bfloat16, to_bf16, narrow_product} & {v for v in option.arguments.values() if callable(v)}}
FUSED = {name for name, option in GRID.items()  # for the kernels that there are: the others are computed by Flax
         if option.layer in ("Conv", "BatchNorm") and name not in (
             "conv empty batch", "conv input dilation", "conv element type", "batch norm running",
             "batch norm running, by call", "batch norm mask", "conv gelu")}


class Sequence(NamedTuple):
    """A recurrent layer in an RNN: the cell's class and arguments, those of the RNN and of its call."""

    cell: str
    arguments: dict[str, Any] = {}
    rnn: dict[str, Any] = {}
    call: dict[str, Any] = {}


FUNCTIONS = {"gate_fn": jax.nn.hard_sigmoid, "activation_fn": jax.nn.relu, "bias_init": nn.initializers.normal(1.0)}
NARROW = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "recurrent_kernel_init": nn.initializers.normal(0.3)}  # not by qr: f32 only
SEQUENCES = {
    "lstm lengths": Sequence("LSTMCell", {}, {"return_carry": True}, {"seq_lengths": jnp.array([5, 3])}),
    "lstm functions": Sequence("LSTMCell", FUNCTIONS, {"time_major": True}),
    "optimized lstm carry": Sequence("OptimizedLSTMCell", {"carry_init": nn.initializers.normal(1.0)},
                                     {"reverse": True, "keep_order": True, "return_carry": True}),
    "optimized lstm bf16": Sequence("OptimizedLSTMCell", {"dtype": jnp.bfloat16}, {"unroll": 2}),
    "gru carry": Sequence("GRUCell", {"kernel_init": nn.initializers.normal(1.0)}, {}, {"initial_carry": jnp.ones((2, 16))}),
    "gru functions": Sequence("GRUCell", FUNCTIONS, {"reverse": True}),
    "gru bf16 parameters": Sequence("GRUCell", NARROW, {"return_carry": True}),
}
