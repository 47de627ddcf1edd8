"""When a fused dense layer is worth it."""

import math

import jax
import jax.numpy as jnp

from jaxfuse.rules.rule import Ladder, OpRules, Rule, points


def size(config, types) -> int:
    """2 · products."""
    x, w = (t.shape for t in types[:2])
    return 2 * math.prod(x) * math.prod(w) // math.prod(w[d] for d in (*config.w_contracted, *config.w_batch))


def shape_class(config, types) -> str:
    return "batched" if config.x_batch else "linear" if config.activation == "none" else "activated"


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


_ROWS = _shapes((1, 64), (8, 64), (64, 64), (8, 256), (1, 768), (128, 128), (8, 768), (128, 256), (256, 512))
_HEADS = tuple(((b, h, t, d), (b, d, h, d)) for b, h, t, d in (
    (1, 2, 8, 8), (1, 4, 16, 16), (2, 4, 32, 32), (8, 1, 64, 64), (2, 8, 64, 64), (8, 12, 64, 64), (8, 12, 128, 128)))
RULES = OpRules(
    "operations", size, shape_class=shape_class,
    ladders={"linear": Ladder(_linear, _ROWS), "activated": Ladder(_activated, _ROWS), "batched": Ladder(_batched, _HEADS)},
    rules=(
        Rule(points(
            (8_192, (4.7, 5.6), (10.2, 20.4)),
            (65_536, (7.5, 6.2), (20, 23.8)),
            (524_288, (14.9, 12.7), (36.3, 58.4)),
            (1_048_576, (18.7, 17.9), (57.8, 91.9)),
            (1_179_648, (74.6, 44.2), (1627, 583)),
            (4_194_304, (48.3, 29.2), (156, 105)),
            (9_437_184, (156, 132), (772, 554)),
            (16_777_216, (125, 88.1), (396, 333)),
            (134_217_728, (844, 703), (2364, 2059))), dtype="float32", shape="linear"),
        Rule(points(
            (8_192, (4.6, 7.1), (12.1, 27)),
            (65_536, (5.7, 6.5), (18.6, 30.8)),
            (524_288, (13.7, 9.1), (45.9, 57.1)),
            (1_048_576, (23, 12.7), (104, 55.1)),
            (1_179_648, (574, 42.9), (858, 184)),
            (4_194_304, (51.5, 21.6), (206, 56.8)),
            (9_437_184, (288, 55.2), (767, 216)),
            (16_777_216, (138, 53.9), (562, 375)),
            (134_217_728, (793, 363), (3273, 1089))), dtype="bfloat16", shape="linear"),
        Rule(points(
            (8_192, (1.7, 6.8), (11.1, 18.6)),
            (65_536, (6.4, 6.7), (15.8, 21)),
            (524_288, (22, 13.2), (41.2, 43.6)),
            (1_048_576, (27.3, 13.9), (71, 55.3)),
            (1_179_648, (63.4, 51.4), (605, 382)),
            (4_194_304, (78.4, 52.2), (204, 120)),
            (9_437_184, (183, 116), (572, 497)),
            (16_777_216, (158, 101), (546, 471)),
            (134_217_728, (887, 790), (2507, 2474))), dtype="float32", shape="activated"),
        Rule(points(
            (8_192, (8.4, 6.2), (13.1, 35.7)),
            (65_536, (10.4, 6.9), (21.9, 42.1)),
            (524_288, (35.6, 18.9), (113, 64.9)),
            (1_048_576, (37.8, 14.7), (128, 51.3)),
            (1_179_648, (383, 35.1), (461, 173)),
            (4_194_304, (99.2, 37.3), (294, 171)),
            (9_437_184, (518, 82.1), (1677, 365)),
            (16_777_216, (351, 107), (1089, 366)),
            (134_217_728, (1338, 503), (3648, 1377))), dtype="bfloat16", shape="activated"),
        Rule(points(
            (2_048, (5.2, 15.3), (12.6, 40.9)),
            (32_768, (5.4, 16.3), (20.1, 26.1)),
            (524_288, (13.8, 10.4), (43, 30.8)),
            (4_194_304, (51.2, 26.4), (181, 86.2)),
            (8_388_608, (104, 51), (492, 174)),
            (50_331_648, (598, 292), (3179, 992)),
            (402_653_184, (5302, 2485), (17006, 8073))), dtype="float32", shape="batched"),
        Rule(points(
            (2_048, (5.7, 15.4), (11.9, 35)),
            (32_768, (5.4, 16.5), (21.1, 33.8)),
            (524_288, (15.6, 9.1), (47.3, 28)),
            (4_194_304, (59.4, 18.2), (198, 56.1)),
            (8_388_608, (121, 30.2), (409, 96)),
            (50_331_648, (722, 148), (2536, 745)),
            (402_653_184, (5752, 1176), (19767, 3878))), dtype="bfloat16", shape="batched"),
    ),
)  # fmt: skip
