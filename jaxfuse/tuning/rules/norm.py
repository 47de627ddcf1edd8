"""When a fused layer, RMS, group or instance norm is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.tuning.rules.rule import ZEN_3, ZEN_4, Ladder, OpRules, Rule, points


def size(config, types) -> int:
    return math.prod(types[0].shape)


def shape_class(config, types) -> str:
    return "rows" if config.inner[0] == 1 else "places"


def _layer_norm(x, gamma, beta):
    """As Flax computes it."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    return ((wide - mean) * (jax.lax.rsqrt(var + 1e-6) * gamma) + beta).astype(x.dtype)


def _group_norm(x, gamma, beta):
    """Of 8 groups, as Flax computes it."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], 8, x.shape[-1] // 8)
    mean = wide.mean((1, 2, 4), keepdims=True)
    var = jnp.maximum(0.0, (wide * wide).mean((1, 2, 4), keepdims=True) - mean * mean)
    y = ((wide - mean) * jax.lax.rsqrt(var + 1e-6)).reshape(x.shape)
    return jax.nn.silu((y * gamma + beta).astype(x.dtype))


def _shapes(*shapes):
    return tuple((shape, shape[-1:], shape[-1:]) for shape in shapes)


RULES = OpRules(
    "elements", size, shape_class=shape_class,
    size_sweeps={
        "rows": Ladder(_layer_norm, _shapes((4, 32), (32, 64), (64, 256), (128, 768))),
        "places": Ladder(_group_norm, _shapes((2, 4, 4, 32), (2, 8, 8, 32), (4, 16, 16, 64))),
    },
    rules=(
        Rule(points(
            (128, (6.14, 3.78), (15.0, 8.43)),
            (2_048, (21.9, 5.09), (46.7, 10.4)),
            (16_384, (44.4, 10.8), (95.9, 37.5)),
            (98_304, (63.8, 27.5), (234, 82.1))), dtype="float32", shape="rows", **ZEN_3),
        Rule(points(
            (128, (5.29, 4.03), (11.3, 8.98)),
            (2_048, (13.8, 7.63), (48.8, 11.6)),
            (16_384, (53.0, 15.3), (101, 46.5)),
            (98_304, (105, 57.8), (260, 124))), dtype="bfloat16", shape="rows", **ZEN_3),
        Rule(points(
            (128, (5.09, 4.06), (15.8, 8.72)),
            (2_048, (17.8, 6.08), (74.0, 11.1)),
            (16_384, (50.2, 13.7), (115, 47.8)),
            (98_304, (92.5, 37.7), (371, 106))), dtype="float16", shape="rows", **ZEN_3),
        Rule(points(
            (1_024, (34.1, 6.98), (86.1, 17.8)),
            (4_096, (66.3, 11.0), (111, 28.3)),
            (65_536, (217, 88.7), (535, 245))), dtype="float32", shape="places", **ZEN_3),
        Rule(points(
            (1_024, (14.3, 8.7), (49.5, 19.8)),
            (4_096, (72.4, 11.2), (118, 31.9)),
            (65_536, (199, 93.4), (566, 268))), dtype="bfloat16", shape="places", **ZEN_3),
        Rule(points(
            (1_024, (38.1, 7.62), (134, 17.2)),
            (4_096, (91.5, 11.8), (293, 31.2)),
            (65_536, (348, 89.7), (1870, 258))), dtype="float16", shape="places", **ZEN_3),
        Rule(points(
            (128, (4.95, 2.16), (11.9, 5.29)),
            (2_048, (27.9, 3.53), (40.5, 6.37)),
            (16_384, (25.4, 7.36), (51.5, 23.0)),
            (98_304, (47.2, 15.3), (175.0, 45.0))), dtype="float32", shape="rows", **ZEN_4),
        Rule(points(
            (128, (3.46, 2.32), (6.92, 4.53)),
            (2_048, (6.76, 4.9), (25.4, 8.24)),
            (16_384, (25.8, 10.9), (51.5, 23.6)),
            (98_304, (70.3, 21.6), (182.0, 63.1))), dtype="bfloat16", shape="rows", **ZEN_4),
        Rule(points(
            (1_024, (28.8, 3.51), (67.2, 8.37)),
            (4_096, (28.7, 4.67), (58.4, 11.7)),
            (65_536, (100, 47.8), (273, 135))), dtype="float32", shape="places", **ZEN_4),
        Rule(points(
            (1_024, (10.1, 3.82), (20.9, 9.13)),
            (4_096, (29.6, 7.75), (53.7, 20.2)),
            (65_536, (147, 57.2), (337, 142))), dtype="bfloat16", shape="places", **ZEN_4),
    ),
    dtypes=("float32", "bfloat16", "float16"),
)  # fmt: skip
