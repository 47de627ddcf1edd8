"""Options of Flax's layers, the same for linen and nnx: every combination that a drop-in must compute as Flax does."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Option(NamedTuple):
    """One layer: its class in linen ("Dense" is "Linear" in nnx), the input's shape, the features out, the arguments."""

    layer: str
    shape: tuple[int, ...]
    features: int | None = None
    arguments: dict[str, Any] = {}
    epilogue: str = ""  # of "add" and an activation, joined by "+"


IMAGE = (2, 16, 16, 8)
TOKENS = (4, 32, 64)
MASK = jnp.asarray(jax.random.bernoulli(jax.random.key(5), 0.7, (3, 3, 8, 16)), jnp.float32)


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
    "transpose": conv(layer="ConvTranspose"),
    "transpose strides relu": conv("relu", layer="ConvTranspose", strides=(2, 2)),
    "transpose valid": conv("relu", layer="ConvTranspose", strides=(2, 2), padding="VALID"),
    "dense": Option("Dense", TOKENS, 128),
    "dense gelu": Option("Dense", TOKENS, 128, {}, "gelu"),
    "dense add": Option("Dense", TOKENS, 128, {}, "add"),
    "dense no bias": Option("Dense", TOKENS, 128, {"use_bias": False}, "relu"),
    "dense bf16": Option("Dense", TOKENS, 128, {"dtype": jnp.bfloat16}, "relu"),
    "dense vector": Option("Dense", (64,), 128, {}, "relu"),
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
    "layer norm": Option("LayerNorm", TOKENS),
    "layer norm options": Option("LayerNorm", TOKENS, None, {"epsilon": 1e-3, "use_bias": False}, "gelu"),
    "layer norm two axes": Option("LayerNorm", TOKENS, None, {"reduction_axes": (1, 2), "feature_axes": -1}),
    "layer norm bf16": Option("LayerNorm", TOKENS, None, {"dtype": jnp.bfloat16}),
    "rms norm": Option("RMSNorm", TOKENS),
    "rms norm no scale": Option("RMSNorm", TOKENS, None, {"use_scale": False}, "relu"),
    "group norm": Option("GroupNorm", IMAGE, None, {"num_groups": 4}, "silu"),
    "group norm size": Option("GroupNorm", IMAGE, None, {"num_groups": None, "group_size": 2}),
}
BF16 = {name for name, option in GRID.items() if jnp.bfloat16 in option.arguments.values()}
FUSED = {name for name, option in GRID.items()  # for the kernels that there are: the others are computed by Flax
         if option.layer in ("Conv", "BatchNorm") and name not in (
             "conv empty batch", "conv input dilation", "batch norm running", "conv gelu")}
