"""When a fused convolution is worth it."""

import math

import jax
from jax import lax

from jaxfuse.tuning.rules.rule import (
    ZEN_3, ZEN_3_ONEDNN, ZEN_4_BF16, ZEN_4_BUSY, ZEN_4_ONEDNN, Ladder, OpRules, Rule, points)


def size(config, types) -> int:
    """2 · output positions · filter elements; `x // strides` stands for the positions, whatever the padding."""
    x, w = (t.shape for t in types[:2])
    positions = math.prod(x) // x[config.lhs_spec[1]] // math.prod(config.window_strides)
    return 2 * positions * math.prod(w)


def shape_class(config, types) -> str:
    """A transposed one of few outputs is a product (`ops/scattered.py`), one of one channel to one a sum of taps (`ops/taps.py`):
    classes of their own. Where a dilated one has no rule of its own, the last ones speak for it."""
    transposed = any(d > 1 for d in config.lhs_dilation or ()) and config.feature_group_count == 1
    if transposed and types[1].shape[config.rhs_spec[0]] < 8 and all(d == 1 for d in config.rhs_dilation):
        return "scattered"
    x, w = (t.shape for t in types[:2])
    plain = not config.transposed and all(s == 1 for s in config.window_strides)
    if plain and x[config.lhs_spec[1]] == w[config.rhs_spec[0]] == 1 and math.prod(w) <= 64:
        return "one channel"
    if config.feature_group_count > 1:
        return "grouped"
    return "dilated" if any(d > 1 for d in config.rhs_dilation) else "full"


def _conv_bias_relu(x, w, b):
    groups = x.shape[-1] // w.shape[2]
    y = lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups)
    return jax.nn.relu(y + b.astype(y.dtype))


def _dilated(x, w, b):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + b.astype(y.dtype))


def _overlapping(x, w):
    """Frames of a signal, added up where they overlap: as many outputs as x has numbers."""
    return lax.conv_transpose(x, w, x.shape[-1:], "SAME", dimension_numbers=("NWC", "WIO", "NWC")).reshape(x.shape)


def _shapes(*rows):
    """(batch, image size, kernel, channels in a group, channels)"""
    return tuple(((n, s, s, c), (k, k, per_group, c), (c,)) for n, s, k, per_group, c in rows)


LADDERS = {
    "full": Ladder(_conv_bias_relu, _shapes(
        (1, 4, 3, 4, 4), (1, 8, 3, 8, 8), (1, 8, 3, 16, 16), (1, 14, 1, 32, 32), (1, 14, 3, 32, 32), (1, 14, 3, 64, 64),
        (8, 14, 3, 64, 64))),
    "dilated": Ladder(_dilated, _shapes((1, 14, 3, 32, 32), (1, 14, 3, 64, 64), (1, 28, 3, 256, 256))),
    "grouped": Ladder(_conv_bias_relu, _shapes((1, 4, 3, 1, 8), (1, 8, 3, 1, 16), (1, 14, 3, 1, 64))),
    "one channel": Ladder(_conv_bias_relu, _shapes(
        (1, 4, 3, 1, 1), (1, 8, 3, 1, 1), (8, 5, 3, 1, 1), (1, 28, 3, 1, 1), (8, 128, 3, 1, 1), (1, 512, 7, 1, 1))),
    "scattered": Ladder(_overlapping, tuple(((n, s, c), (4 * c, c, 1)) for n, s, c in ((1, 8, 8), (1, 32, 64), (2, 128, 256)))),
}
RULES = OpRules(
    "operations", size, size_sweeps=LADDERS, shape_class=shape_class,
    rules=(
        Rule(points(
            (3_612_672, (91.9, 69.5), (255, 251)),
            (14_450_688, (249, 163), (876, 679)),
            (924_844_032, (7680, 6490), (30300, 22600))), dtype="float32", shape="dilated", **ZEN_3_ONEDNN),
        Rule(points(
            (3_612_672, (89.4, 64.0), (289, 286)),
            (14_450_688, (261, 190), (839, 694)),
            (924_844_032, (7790, 6680), (31100, 24600))), dtype="bfloat16", shape="dilated", **ZEN_3_ONEDNN),
        Rule(points(
            (3_612_672, (96.8, 80.0), (252, 200)),
            (14_450_688, (295, 180), (820, 653)),
            (924_844_032, (7440, 6520), (28000, 22200))), dtype="float16", shape="dilated", **ZEN_3_ONEDNN),
        Rule(points(
            (4_608, (15.5, 14.0), (35.5, 46.4)),
            (73_728, (21.0, 16.3), (67.2, 68.5)),
            (294_912, (24.4, 20.9), (99.9, 74.4)),
            (401_408, (32.9, 21.1), (68.5, 56.2)),
            (3_612_672, (72.7, 47.2), (216, 143)),
            (14_450_688, (217, 122), (751, 378)),
            (115_605_504, (1470, 1070), (4770, 2900))), dtype="float32", shape="full", **ZEN_3_ONEDNN),
        Rule(points(
            (4_608, (15.6, 18.3), (34.3, 61.8)),
            (73_728, (23.1, 40.1), (71.1, 74.4)),
            (294_912, (27.7, 42.8), (117, 86.8)),
            (401_408, (33.0, 41.0), (109, 124)),
            (3_612_672, (77.6, 79.0), (269, 176)),
            (14_450_688, (217, 161), (898, 436)),
            (115_605_504, (1710, 1060), (5960, 3250))), dtype="float16", shape="full", **ZEN_3_ONEDNN),
        Rule(points(
            (4_608, (19.9, 18.4), (57.8, 95.8)),
            (73_728, (28.4, 33.9), (112, 96.2)),
            (294_912, (27.0, 32.6), (137, 134)),
            (401_408, (38.5, 30.1), (111, 176)),
            (3_612_672, (121, 89.9), (288, 297)),
            (14_450_688, (226, 218), (1310, 735)),
            (115_605_504, (2170, 1080), (7810, 3910))), dtype="bfloat16", shape="full", **ZEN_3_ONEDNN),
        Rule(points(
            (2_304, (40.2, 14.2), (83.4, 49.0)),
            (18_432, (104, 16.1), (248, 51.1)),
            (225_792, (439, 23.2), (1200, 92.5))), dtype="float32", shape="grouped", **ZEN_3_ONEDNN),
        Rule(points(
            (2_304, (66.1, 44.2), (99.7, 80.5)),
            (18_432, (116, 43.4), (318, 70.4)),
            (225_792, (486, 50.0), (1290, 108))), dtype="float16", shape="grouped", **ZEN_3_ONEDNN),
        Rule(points(
            (2_304, (59.6, 17.3), (90.3, 88.1)),
            (18_432, (144, 23.5), (380, 92.8)),
            (225_792, (471, 34.8), (1360, 166))), dtype="bfloat16", shape="grouped", **ZEN_3_ONEDNN),
        Rule(points(
            (2_304, (35.5, 8.34), (49.2, 28.9)),
            (18_432, (57.7, 8.72), (147, 25.2)),
            (225_792, (361, 14), (809, 47.2))), dtype="float32", shape="grouped", **ZEN_4_ONEDNN),
        Rule(points(
            (2_304, (32.6, 11.9), (51.3, 26.1)),
            (18_432, (57.2, 9.65), (182, 27.4)),
            (225_792, (375, 12.4), (894, 37.5))), dtype="bfloat16", shape="grouped", **ZEN_4_BF16),
        Rule(points(
            (288, (10.8, 2.42), (24.4, 20.5)),
            (1_152, (20.5, 2.41), (36.9, 24.5)),
            (3_600, (30.1, 2.83), (58.7, 41.7)),
            (14_112, (72.2, 10.7), (164, 68.0)),
            (2_359_296, (6100, 309), (12100, 2780)),
            (25_690_112, (20600, 4740), (76700, 19700))), dtype="float32", shape="one channel", **ZEN_3),
        Rule(points(
            (288, (11.6, 2.50), (25.2, 22.5)),
            (1_152, (22.8, 2.79), (42.6, 20.0)),
            (3_600, (30.3, 6.71), (70.7, 54.7)),
            (14_112, (84.6, 14.0), (197, 62.1)),
            (2_359_296, (7790, 761), (14300, 4430)),
            (25_690_112, (22100, 3690), (77600, 18200))), dtype="bfloat16", shape="one channel", **ZEN_3),
        Rule(points(
            (288, (15.2, 2.93), (34.3, 26.0)),
            (1_152, (24.3, 2.90), (39.8, 37.2)),
            (3_600, (38.0, 4.65), (68.8, 74.4)),
            (14_112, (76.9, 14.2), (182, 123)),
            (2_359_296, (5790, 475), (12700, 3390)),
            (25_690_112, (24000, 4220), (68500, 17600))), dtype="float16", shape="one channel", **ZEN_3),
        Rule(points(
            (4_096, (23.1, 6.07), (28.2, 23.6)),
            (1_048_576, (124, 46), (424, 151)),
            (134_217_728, (9564, 1384), (57326, 7605))), dtype="float32", shape="scattered", **ZEN_3),
        Rule(points(
            (4_096, (8.67, 8.05), (24.8, 33.6)),
            (1_048_576, (129, 51.5), (479, 175)),
            (134_217_728, (9493, 1748), (53981, 8855))), dtype="bfloat16", shape="scattered", **ZEN_3),
        Rule(points(
            (288, (8.31, 2.5), (13.6, 14.8)),
            (1_152, (7.66, 6.03), (22.2, 16.8)),
            (3_600, (16.9, 6.43), (35.1, 37)),
            (14_112, (44.4, 5.72), (114, 65.2)),
            (2_359_296, (9220, 326), (29300, 2290)),
            (25_690_112, (72700, 10600), (218000, 36200))), dtype="float32", shape="one channel", **ZEN_4_BUSY),
        Rule(points(
            (288, (7.92, 5.43), (15.6, 16.5)),
            (1_152, (13.6, 9.09), (24.1, 17)),
            (3_600, (22.8, 10.1), (41.1, 45.9)),
            (14_112, (49.6, 13), (124, 54.8)),
            (2_359_296, (11900, 584), (40200, 4040)),
            (25_690_112, (78800, 17000), (235000, 15800))), dtype="bfloat16", shape="one channel", **ZEN_4_BUSY),
        Rule(points(
            (288, (6.12, 3.76), (10.8, 13.7)),
            (1_152, (13.9, 5.46), (22.4, 19.8)),
            (3_600, (22.8, 10.1), (41.5, 43.8)),
            (14_112, (49.4, 12.6), (122, 79.1)),
            (2_359_296, (15300, 550), (44600, 6490)),
            (25_690_112, (78500, 16900), (228000, 54400))), dtype="float16", shape="one channel", **ZEN_4_BUSY),
        Rule(points(
            (4_096, (4.41, 4.21), (10.1, 10.8)),
            (1_048_576, (626, 30.6), (883, 98)),
            (134_217_728, (392000, 3990), (726000, 39200))), dtype="float32", shape="scattered", **ZEN_4_BUSY),
        Rule(points(
            (4_096, (4.92, 5.1), (10, 12)),
            (1_048_576, (621, 19.7), (894, 90.4)),
            (134_217_728, (190000, 939), (383000, 19900))), dtype="bfloat16", shape="scattered", **ZEN_4_BUSY),
        Rule(points(
            (4_608, (6.29, 9.15), (17, 25.5)),
            (73_728, (11.7, 10.6), (47.6, 33.6)),
            (294_912, (13.3, 11.5), (79.5, 33.7)),
            (401_408, (15.7, 11.8), (43.2, 35.7)),
            (3_612_672, (48.4, 27.8), (144, 88.5)),
            (14_450_688, (154, 80.6), (490, 251)),
            (115_605_504, (1150, 525), (2666, 1601))), dtype="float32", **ZEN_4_ONEDNN),
        Rule(points(
            (4_608, (7.58, 8.18), (21.4, 28.5)),
            (73_728, (13.2, 15.4), (49.1, 35.3)),
            (294_912, (14.8, 11.1), (86.4, 42.9)),
            (401_408, (20.8, 10.3), (61, 32.6)),
            (3_612_672, (55.6, 21.5), (163, 83.1)),
            (14_450_688, (166, 49.5), (541, 186)),
            (115_605_504, (1206, 266), (3958, 918))), dtype="bfloat16", **ZEN_4_BF16),
    ),
    dtypes=("float32", "bfloat16", "float16"),
)  # fmt: skip
