"""Convolutions in int8 for tests: named geometries, and what numpy says of their sums."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from arrays import array
from conv_oracle import F32, Case, convolve, random, random_filter
from jaxfuse.ops.activations import named
from jaxfuse.ops.conv import int8
from jaxfuse.ops.conv.config import ConvConfig

CASES = {
    "1x1": Case((2, 7, 7, 64), (1, 1, 64, 48)),
    "1x1, odd": Case((1, 9, 7, 13), (1, 1, 13, 27)),
    "1x1, strided": Case((8, 9, 8, 20), (1, 1, 20, 33), strides=2),
    "3x3": Case((8, 9, 10, 32), (3, 3, 32, 40), padding=(1, 1)),
    "3x3, strided, uneven padding": Case((1, 15, 14, 33), (3, 3, 33, 17), strides=(2, 1), padding=[(0, 1), (2, 0)]),
    "stem": Case((2, 23, 24, 3), (7, 7, 3, 24), strides=2, padding=(3, 3)),
    "few features, no padding": Case((1, 8, 9, 5), (2, 3, 5, 7)),
    "whole lines of the cache": Case((3, 9, 7, 64), (3, 3, 64, 40), padding=(1, 1)),
    "dilated": Case((2, 11, 12, 18), (3, 2, 18, 16), padding=[(2, 2), (3, 0)], dilation=(2, 3)),
    "one pixel": Case((1, 1, 1, 70), (1, 1, 70, 33)),
    "padding only": Case((1, 2, 2, 5), (3, 3, 5, 8), strides=3, padding=(4, 4)),
    "OIHW": Case((1, 6, 7, 20), (24, 20, 3, 3), layout=("NHWC", "OIHW", "NHWC")),
    "one input": Case((2, 13, 14, 1), (5, 5, 1, 9), padding=(2, 2)),
    "line": Case((3, 31, 16), (5, 16, 24), strides=3, padding=(2, 1)),
    "volume": Case((1, 4, 5, 6, 7), (2, 3, 2, 7, 19), strides=(1, 2, 2), padding=(1, 1)),
    "long": Case((1, 3, 3, 1100), (3, 3, 1100, 17), padding=(1, 1)),
    "many rows": Case((2, 40, 41, 9), (2, 2, 9, 20), padding=(1, 0)),
}
RANGES = {"from zero": int8.Range(1.0, 0), "around zero": int8.Range(1.0, 128), "uneven": int8.Range(1.0, 37),
          "up to zero": int8.Range(1.0, 255)}
NARROW = (True, False)


def config_of(case, **of):
    return ConvConfig(case.strides, tuple(case.padding), case.dilation, case.groups, *case.specs, (1,) * len(case.strides), **of)


def integers(case, range_, narrow, seed=0):
    """(x, w): all of the range, and the largest weight in each feature, whose scale is then 1. Narrow ones are quarters of it beside
    zeros: four inputs that are neighbours, and four behind them, may be added in 16 bits."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-range_.zero, 256 - range_.zero, case.x)
    spec, most = case.specs.rhs_spec, int8.MOST
    order = *spec[2:], spec[1], spec[0]
    shape = [case.w[d] for d in order]
    w = rng.integers(-(most // 4 if narrow else most), (most // 4 if narrow else most) + 1, (math.prod(shape[:-1]), shape[-1]))
    at = rng.integers(len(w))
    w[max(0, at - 7) if narrow else at : at + 8 if narrow else at] = 0
    w[at] = most
    return x, w.reshape(shape).transpose(np.argsort(order))


def computed(made, x, w, *rest):
    """By a program of its own: the kernel is chosen when it is compiled."""
    return np.asarray(jax.jit(lambda *args: int8.OP(made, *args)[0])(x, *int8.pack(made, w), *rest))


def check_sums(case, range_, narrow):
    """To the last bit."""
    x, w = integers(case, range_, narrow)
    made = int8.config_of(config_of(case), case.w, range_, narrow)
    y = computed(made, array(x, F32), w)
    np.testing.assert_array_equal(y, np.float32(convolve(case, x, w)))
    return y


def check_extremes(narrow):
    """The largest bytes, whose products fit into 16 bits only where the filter is narrow."""
    most = int8.MOST_OF_FOUR // 4 if narrow else int8.MOST
    for inner, taps, sign in itertools.product((600, 37), (1, 3), (1, -1)):
        case = Case((1, 9, 8, inner), (taps, taps, inner, 20))
        made = int8.config_of(config_of(case), case.w, RANGES["from zero"], narrow)
        y = computed(made, jnp.full(case.x, 255.0), np.full(case.w, sign * most))
        np.testing.assert_array_equal(y, np.float32(sign * inner * taps**2 * 255 * most))


def quantised(case, dtype=F32, activation="none", narrow=True, range_=None):
    x, w = random(case.x, dtype), random_filter(case, dtype)
    found = range_ or int8.Range.of(float(x.min()), float(x.max()))
    features = case.y[case.specs.out_spec[1]]
    config = config_of(case, has_bias=True, has_residual=True, activation=named(activation))
    return int8.config_of(config, case.w, found, narrow), x, w, random(features, dtype, 3), random(case.y, dtype, 4)
