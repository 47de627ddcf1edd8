"""Convolutions as the native targets take them: named geometries, calls, and the same sums by numpy in float64."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from arrays import array
from attributes import attributes
from jaxfuse.runtime import ffi

F32, BF16 = jnp.float32, jnp.bfloat16
LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


class Case:
    """A convolution's shapes and attributes; padding is one pair for all spatial dimensions or a list of pairs."""

    def __init__(self, x, w, strides=1, padding=(0, 0), dilation=1, groups=1, layout=None):
        n = len(x) - 2
        every = lambda value: tuple(value) if isinstance(value, (tuple, list)) else (value,) * n
        self.x, self.w, self.strides, self.dilation, self.groups = x, w, every(strides), every(dilation), groups
        self.padding = padding if isinstance(padding, list) else [padding] * n
        self.specs = lax.conv_dimension_numbers(x, w, layout or LAYOUTS[n])

    @property
    def attrs(self):
        low, high = zip(*self.padding)
        return self.specs._asdict() | dict(
            window_strides=self.strides, padding_low=low, padding_high=high, lhs_dilation=(1,) * len(self.strides),
            rhs_dilation=self.dilation, feature_group_count=self.groups)

    @functools.cached_property
    def y(self):
        return jax.eval_shape(
            functools.partial(lax.conv_general_dilated, window_strides=self.strides, padding=self.padding, rhs_dilation=self.dilation,
                              dimension_numbers=self.specs, feature_group_count=self.groups),
            jax.ShapeDtypeStruct(self.x, F32), jax.ShapeDtypeStruct(self.w, F32)).shape

    def per_feature(self, v):
        return np.asarray(v, np.float64).reshape([-1 if i == self.specs.out_spec[1] else 1 for i in range(len(self.y))])


CASES = {
    "3x3": Case((2, 14, 14, 64), (3, 3, 64, 64), padding=(1, 1)),
    "1x1": Case((2, 7, 7, 64), (1, 1, 64, 128)),
    "1x1, odd": Case((3, 9, 7, 13), (1, 1, 13, 27)),
    "1x1, OIHW": Case((2, 30, 35, 24), (41, 24, 1, 1), layout=("NHWC", "OIHW", "NHWC")),
    "1x1, many columns": Case((1, 10, 10, 256), (1, 1, 256, 130)),
    "1x1, 3-D, many pixels": Case((2, 5, 6, 7, 33), (1, 1, 1, 33, 100)),
    "1x1, 1-D, to NCH": Case((2, 30, 16), (1, 16, 24), layout=("NHC", "HIO", "NCH")),
    "1x1, padded": Case((2, 7, 7, 64), (1, 1, 64, 48), padding=[(1, 1), (0, 2)]),
    "1x1, 1-D, padded": Case((2, 5, 16), (1, 16, 24), padding=(1, 0)),
    "1x1 strided": Case((2, 14, 14, 32), (1, 1, 32, 64), strides=2),
    "1x1 strided, few features": Case((2, 28, 28, 3), (1, 1, 3, 64), strides=2),
    "1x1 strided, groups, odd image": Case((4, 5, 7, 16), (1, 1, 8, 16), strides=2, groups=2),
    "1x1 strided, few features, NCHW": Case((2, 5, 9, 24), (7, 5, 1, 1), strides=(1, 2), layout=("NCHW", "OIHW", "NCHW")),
    "3x3 strided, asymmetric": Case((2, 15, 14, 32), (3, 3, 32, 48), strides=(2, 1), padding=[(0, 1), (2, 0)]),
    "stem": Case((2, 32, 32, 3), (7, 7, 3, 64), strides=2, padding=(3, 3)),
    "depthwise": Case((2, 14, 14, 96), (3, 3, 1, 96), padding=(1, 1), groups=96),
    "depthwise, multiplier 2": Case((2, 14, 14, 32), (3, 3, 1, 64), padding=(1, 1), groups=32),
    "depthwise 5x5": Case((2, 9, 11, 35), (5, 5, 1, 35), padding=(2, 2), groups=35),
    "depthwise 7x7, wide": Case((1, 8, 30, 17), (7, 7, 1, 17), padding=[(3, 3), (1, 4)], groups=17),
    "depthwise 6x9, strided": Case((2, 15, 24, 20), (6, 9, 1, 20), strides=(2, 3), padding=[(0, 1), (4, 2)], groups=20),
    "depthwise 7x7, strided": Case((1, 19, 41, 16), (7, 7, 1, 16), strides=2, padding=[(3, 3), (2, 3)], groups=16),
    "depthwise, strided": Case((2, 13, 20, 40), (3, 3, 1, 40), strides=2, padding=[(0, 1), (1, 1)], groups=40),
    "depthwise, strides wider than the filter": Case((1, 11, 13, 3), (5, 2, 1, 3), strides=(1, 4), padding=(1, 1), groups=3),
    "depthwise, dilated": Case((2, 12, 21, 33), (3, 3, 1, 33), padding=[(2, 1), (3, 3)], dilation=(2, 3), groups=33),
    "depthwise, dilated and strided": Case((2, 14, 23, 19), (3, 5, 1, 19), strides=(2, 4), padding=(4, 4), dilation=(1, 2),
                                           groups=19),
    "depthwise, no padding": Case((1, 9, 9, 16), (5, 5, 1, 16), groups=16),
    "depthwise, padding wider than the filter": Case((1, 5, 4, 8), (4, 4, 1, 8), padding=(6, 5), groups=8),
    "depthwise, filter wider than the image": Case((2, 7, 7, 48), (13, 13, 1, 48), padding=(6, 6), groups=48),
    "depthwise, causal": Case((2, 100, 24), (4, 1, 24), padding=(3, 0), groups=24),
    "depthwise, 3-D": Case((1, 5, 6, 9, 18), (3, 3, 3, 1, 18), padding=(1, 1), groups=18),
    "depthwise, OIHW": Case((2, 9, 9, 16), (16, 1, 5, 5), padding=(2, 2), groups=16, layout=("NHWC", "OIHW", "NHWC")),
    "grouped": Case((2, 14, 14, 64), (3, 3, 4, 64), padding=(1, 1), groups=16),
    "dilated": Case((2, 14, 14, 32), (3, 3, 32, 32), padding=(2, 2), dilation=2),
    "odd": Case((2, 9, 11, 5), (3, 2, 5, 7), strides=(2, 1), padding=[(2, 0), (0, 1)]),
    "padding wider than the filter": Case((1, 5, 5, 8), (2, 2, 8, 8), padding=(3, 3)),
    "one pixel": Case((1, 1, 1, 64), (1, 1, 64, 32)),
    "one feature": Case((2, 14, 14, 1), (3, 3, 1, 1), padding=(1, 1)),
    "1-D": Case((2, 30, 16), (5, 16, 24), strides=2, padding=(2, 2)),
    "1-D depthwise": Case((2, 30, 16), (5, 1, 16), padding=(4, 0), groups=16),
    "3-D": Case((1, 6, 7, 8, 16), (3, 3, 3, 16, 16), padding=(1, 1)),
    "NCHW": Case((2, 64, 14, 14), (32, 64, 3, 3), padding=(1, 1), layout=("NCHW", "OIHW", "NCHW")),
    "NCHW grouped": Case((2, 32, 9, 9), (64, 8, 3, 3), padding=(1, 1), groups=4, layout=("NCHW", "OIHW", "NCHW")),
    "features and rows in parts": Case((2, 21, 19, 139), (3, 2, 139, 67), padding=[(1, 1), (0, 1)]),
    "images in a block": Case((7, 9, 8, 18), (3, 3, 18, 33), padding=[(2, 1), (4, 3)], dilation=(1, 2)),
    "NHWC, OIHW": Case((3, 12, 13, 20), (24, 20, 3, 3), strides=2, layout=("NHWC", "OIHW", "NHWC")),
    "grouped, large images": Case((3, 24, 24, 16), (3, 3, 4, 32), padding=(1, 1), groups=4),
    "Winograd, odd image": Case((3, 15, 13, 40), (3, 3, 40, 48), padding=(1, 1)),
    "Winograd, uneven padding": Case((2, 19, 17, 33), (3, 3, 33, 35), padding=[(2, 0), (0, 1)]),
    "Winograd, no padding": Case((2, 20, 20, 64), (3, 3, 64, 96)),
    "Winograd, OIHW": Case((2, 17, 18, 36), (40, 36, 3, 3), padding=(1, 1), layout=("NHWC", "OIHW", "NHWC")),
    "mixed": Case((14, 64, 2, 9), (3, 64, 3, 32), padding=(1, 1), layout=("HCNW", "HIWO", "NHWC")),
}
LONG = {  # sums of so many products that f32 kernels cut them up
    "long sums": Case((2, 9, 8, 128), (3, 3, 128, 128), padding=(1, 1)),
    "long sums, Winograd": Case((4, 13, 14, 512), (3, 3, 512, 160), padding=(1, 1)),
    "long sums, 1x1": Case((2, 7, 7, 2048), (1, 1, 2048, 1024)),
    "long sums, 1x1 strided": Case((1, 9, 8, 1024), (1, 1, 1024, 40), strides=2),
    "long sums, strided, padded behind": Case((2, 10, 10, 256), (3, 3, 256, 32), strides=2, padding=(0, 1)),
    "long sums, dilated": Case((1, 9, 8, 192), (3, 3, 192, 96), padding=[(2, 2), (1, 3)], dilation=2),
    "long sums, no padding": Case((3, 7, 9, 256), (3, 3, 256, 256)),
    "long sums, 1-D": Case((2, 30, 256), (5, 256, 160), padding=(4, 0)),
    "long sums, 3-D": Case((1, 3, 4, 5, 64), (3, 3, 3, 64, 64), padding=(1, 1)),
}
CASES |= LONG
MANY_PIXELS = {  # images so large that no sum of a filter's gradient takes in all of one
    "1-D, one input": Case((1, 16001, 1), (9, 1, 16), padding=(4, 4)),
    "1-D, strided": Case((2, 20003, 4), (3, 4, 8), strides=2, padding=(1, 2)),
    "1-D, dilated": Case((1, 5001, 7), (4, 7, 9), padding=(6, 0), dilation=5),
    "1-D, dilated, many features": Case((1, 3001, 20), (3, 20, 18), padding=(40, 2), dilation=21),
    "1-D, NCH": Case((2, 6, 2001), (11, 6, 3), layout=("NCH", "OIH", "NHC")),
    "1-D, groups": Case((1, 9001, 12), (5, 4, 6), padding=(2, 2), groups=3),
    "1-D, depthwise, NCH": Case((1, 5, 4001), (5, 1, 4), padding=(3, 0), groups=5, layout=("NCH", "OIH", "NCH")),
    "stem": Case((2, 97, 201, 3), (7, 7, 3, 10), strides=2, padding=[(3, 2), (2, 3)]),
    "one input": Case((1, 113, 111, 1), (3, 3, 1, 8), padding=(1, 1)),
    "one input, one output": Case((1, 131, 127, 1), (5, 5, 1, 1), padding=(2, 2)),
    "3x3, Winograd": Case((2, 113, 111, 24), (3, 3, 24, 40), padding=(1, 1)),
    "wide": Case((1, 5, 1111, 5), (3, 3, 5, 4), padding=[(0, 1), (2, 0)]),
    "strided": Case((1, 62, 71, 20), (3, 2, 20, 33), strides=(2, 1), padding=[(1, 1), (0, 0)]),
    "dilated": Case((2, 61, 59, 16), (3, 3, 16, 20), padding=[(2, 2), (4, 0)], dilation=(2, 3)),
    "features in parts": Case((1, 33, 31, 70), (2, 2, 70, 131), strides=(1, 1), dilation=(1, 2)),
    "1x1, few inputs": Case((2, 90, 91, 3), (1, 1, 3, 8)),
    "1x1, strided": Case((1, 120, 101, 9), (1, 1, 9, 17), strides=(2, 1)),
    "NCHW": Case((2, 3, 60, 61), (8, 3, 3, 3), padding=(1, 1), layout=("NCHW", "OIHW", "NCHW")),
    "batch last": Case((30, 31, 7, 5), (3, 3, 7, 6), padding=(1, 1), layout=("HWCN", "HWIO", "HWCN")),
    "groups": Case((2, 53, 54, 32), (3, 3, 8, 36), padding=(1, 1), groups=4),
    "groups, dilated": Case((1, 53, 54, 8), (3, 3, 2, 12), padding=(2, 2), dilation=2, groups=4),
    "depthwise": Case((1, 111, 113, 19), (3, 3, 1, 19), padding=(1, 1), groups=19),
    "depthwise, NCHW": Case((2, 5, 61, 43), (5, 1, 3, 3), padding=(1, 1), groups=5, layout=("NCHW", "OIHW", "NCHW")),
    "two filters for each input": Case((1, 81, 83, 6), (3, 3, 1, 12), strides=(1, 2), padding=(1, 1), groups=6),
    "3-D": Case((1, 14, 21, 13, 2), (3, 3, 3, 2, 4), padding=(1, 1)),
    "3-D, strided": Case((2, 21, 12, 34, 18), (3, 1, 2, 18, 20), strides=(2, 1, 1), padding=[(1, 1), (0, 0), (0, 1)]),
    "3-D, dilated, groups": Case((1, 12, 15, 21, 6), (2, 3, 3, 3, 8), padding=[(1, 3), (2, 2), (0, 4)], dilation=(3, 2, 2), groups=2),
    "3-D, depthwise": Case((1, 13, 12, 21, 10), (3, 3, 3, 1, 10), padding=(1, 1), groups=10),
}
ALPHA = 0.125
SLOPES = {  # of y
    "none": lambda y, a: 1,
    "relu": lambda y, a: y > 0,
    "leaky_relu": lambda y, a: np.where(y > 0, 1, a),
    "elu": lambda y, a: np.where(y > 0, 1, y + a),
    "sigmoid": lambda y, a: y * (1 - y),
    "tanh": lambda y, a: 1 - y * y,
    "selu": lambda y, a: np.where(y > 0, 1.0507009873554805, y + 1.0507009873554805 * 1.6732632423543772),
    "celu": lambda y, a: np.where(y > 0, 1, y / a + 1),
    "hard_sigmoid": lambda y, a: ((y > 0) & (y < 1)) / 6,
    "softplus": lambda y, a: -np.expm1(-y),
}


def taps(case, x):
    """x as (batch, group, feature, *spatial), padded, and for each filter tap (its index, the window that it sees)."""
    x = np.transpose(np.float64(x), case.specs.lhs_spec)
    x = np.pad(x, [(0, 0), (0, 0), *case.padding]).reshape(x.shape[0], case.groups, x.shape[1] // case.groups, *[
        n + sum(pair) for n, pair in zip(x.shape[2:], case.padding)
    ])  # fmt: skip
    out = [case.y[i] for i in case.specs.out_spec[2:]]
    kernel = [case.w[i] for i in case.specs.rhs_spec[2:]]
    windows = []
    for tap in itertools.product(*map(range, kernel)):
        starts = [t * d for t, d in zip(tap, case.dilation)]
        spatial = [slice(s, s + (n - 1) * step + 1, step) for s, n, step in zip(starts, out, case.strides)]
        windows.append((tap, (..., *spatial)))
    return x, windows


def grouped_filter(case, w):
    w = np.transpose(np.float64(w), case.specs.rhs_spec)
    return w.reshape(case.groups, w.shape[0] // case.groups, *w.shape[1:])


def to_layout(spec, value):
    return np.transpose(value, np.argsort(spec))


def matrices(window):
    """Of what a tap sees: (batch, group, feature, pixel)."""
    return window.reshape(*window.shape[:3], math.prod(window.shape[3:]))


def convolve(case, x, w):
    x, windows = taps(case, x)
    w = grouped_filter(case, w)
    y = sum(w[(..., *tap)] @ matrices(x[window]) for tap, window in windows)
    out = [case.y[i] for i in case.specs.out_spec]
    return to_layout(case.specs.out_spec, y.reshape(out))


def gradients(case, x, w, g):
    x, windows = taps(case, x)
    w = grouped_filter(case, w)
    g = np.transpose(np.float64(g), case.specs.out_spec)
    g = matrices(g.reshape(g.shape[0], case.groups, g.shape[1] // case.groups, *g.shape[2:]))
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for tap, window in windows:
        dx[window] += (w[(..., *tap)].swapaxes(1, 2) @ g).reshape(x[window].shape)
        dw[(..., *tap)] = (g @ matrices(x[window]).swapaxes(2, 3)).sum(0)
    dx = dx.reshape(dx.shape[0], -1, *dx.shape[3:])
    inside = [slice(low, n - high) for (low, high), n in zip(case.padding, dx.shape[2:])]
    dx = to_layout(case.specs.lhs_spec, dx[(..., *inside)])
    return dx, to_layout(case.specs.rhs_spec, dw.reshape(-1, *dw.shape[2:]))


def multiplies_padding(dtype) -> bool:
    """Whether the filter meets padding as zeros here, where a tap that is not finite makes NaN: oneDNN's tiles of AMX do so."""
    return dtype == BF16 and ffi.native().info().get("isa") == "avx512_core_amx"


def random(shape, dtype=F32, seed=0):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def random_filter(case, dtype=F32):
    """So scaled that x (*) w is about as large as x."""
    fan_in = max(1, np.prod(case.w) // max(1, case.w[case.specs.rhs_spec[0]]))
    return array(np.asarray(random(case.w, seed=1)) / np.float32(np.sqrt(fan_in)), dtype)


def forward(case, x, w, scale=None, bias=None, residual=None, activation="none", shape=None,
            residual_last=False, save_z=False, **attrs):
    """y, or (y, z); `attrs` in place of the case's."""
    extras = [extra for extra in (scale, bias, residual) if extra is not None]
    outs = ffi.call(
        "jaxfuse_conv_fwd", [jax.ShapeDtypeStruct(shape or case.y, x.dtype)] * (1 + save_z), x, w, *extras,
        has_scale=scale is not None, has_bias=bias is not None, has_residual=residual is not None,
        residual_last=residual_last, save_z=save_z, **attributes(activation, ALPHA) | case.attrs | attrs,
    )  # fmt: skip
    return outs if save_z else outs[0]


def backward(case, x, w, dy, y, activation, want=("dx", "dw", "db", "dresidual"), dw_type=F32, db_type=F32,
             by_value=True):
    features = case.y[case.specs.out_spec[1]]
    types = {"dx": (x.shape, x.dtype), "dw": (w.shape, dw_type), "db": ((features,), db_type), "dresidual": (dy.shape, dy.dtype)}
    operands = [x] * ("dw" in want) + [w] * ("dx" in want) + [dy] + [y] * (activation != "none")
    found = ffi.call(
        "jaxfuse_conv_bwd", [jax.ShapeDtypeStruct(*types[name]) for name in want], *operands, by_value=by_value,
        **{"want_" + name: name in want for name in types}, **attributes(activation, ALPHA), **case.attrs,
    )  # fmt: skip
    return dict(zip(want, found))


def assert_close(got, want):
    """Within one rounding of each value to the dtype of `got`, and the rounding of f32 sums."""
    want, rounding = np.float64(want), 2.0**-8 if got.dtype == BF16 else 2.0**-23
    error = np.abs(np.float64(got) - want)
    allowed = rounding * np.abs(want) + 2e-6 * (1 + np.abs(want).max(initial=0))
    assert got.shape == want.shape and np.all(error <= allowed), f"off by {np.max(error / allowed)} times what is allowed"


def check_forward(case, dtype):
    """With every argument that it may have; all calls are one program."""
    features = case.y[case.specs.out_spec[1]]
    x, w, residual = random(case.x, dtype), random_filter(case, dtype), random(case.y, dtype, 2)
    scale, bias = random(features, seed=3), random(features, dtype, 4)

    @jax.jit
    def calls(x, w, scale, bias, residual):
        return (forward(case, x, w), forward(case, x, w, bias=bias, activation="relu"),
                forward(case, x, w, bias=bias, residual=residual, activation="relu"),
                forward(case, x, w, scale, bias, residual, "relu6"), forward(case, x, w, scale, bias.astype(F32), residual))

    z = convolve(case, x, w)
    biased, added = z + case.per_feature(bias), np.float64(residual)
    scaled = case.per_feature(scale) * z + case.per_feature(bias) + added
    wanted = z, np.maximum(biased, 0), np.maximum(biased + added, 0), np.clip(scaled, 0, 6), scaled
    for got, want in zip(calls(x, w, scale, bias, residual), wanted, strict=True):
        assert_close(got, want)


def check_backward(case, dtype):
    """With two activations, and with gradients of parameters in float32 and in `dtype`; all calls are one program."""
    x, w, dy = random(case.x, dtype), random_filter(case, dtype), random(case.y, dtype, 2)

    def call(x, w, dy, activation):
        y = forward(case, x, w, activation=activation)
        return y, backward(case, x, w, dy, y, activation), backward(case, x, w, dy, y, activation, ("dw", "db"), dtype, dtype)

    calls = jax.jit(lambda *args: {activation: call(*args, activation) for activation in ("none", "relu")})
    for activation, (y, found, rounded) in calls(x, w, dy).items():
        g = np.float64(dy) * SLOPES[activation](np.float64(y), ALPHA)
        dx, dw = gradients(case, x, w, g)
        db = g.sum(tuple(i for i in range(g.ndim) if i != case.specs.out_spec[1]))
        assert_close(found["dx"], dx)
        np.testing.assert_array_equal(np.float64(found["dresidual"]), g)
        for gradient in (found, rounded):
            assert_close(gradient["dw"], dw)
            assert_close(gradient["db"], db)
