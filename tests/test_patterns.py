"""Every pattern in each spelling it is written in, and beside it the near-misses, each with the reason it must give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse

def randn(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape, dtype)


def conv(x, w, **kwargs):
    options = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) | kwargs
    return lax.conv_general_dilated(x, w, **options)


X, W, B, R = randn(2, 8, 8, 4), 0.2 * randn(3, 3, 4, 8), randn(8, seed=1), randn(2, 8, 8, 8, seed=2)
GAMMA, BETA, MEAN, VAR = randn(8, seed=3), randn(8, seed=4), randn(8, seed=5), jnp.abs(randn(8, seed=6))


def patterns(fn, *args):
    report = jaxfuse.explain(fn, *args, policy="always")
    left = *report.skipped, *report.unfused_steps
    return [s.pattern for s in report.fused], [(s.pattern, s.reason) for s in left]


def check_values(fn, *args, tolerance=2e-5):
    """The fused function and its gradient give what the function gives."""
    fused = jaxfuse.fuse(fn, policy="always")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), fused(*args), fn(*args))

    def scalar(f):
        return lambda *a: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(f(*a)))

    floats = tuple(range(len(args)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=20 * tolerance, atol=20 * tolerance),
        jax.grad(scalar(fused), floats)(*args), jax.grad(scalar(fn), floats)(*args))


# --- convolution ---------------------------------------------------------------------------------------------------

CONV_HITS = {
    "conv": lambda x, w, b, r: conv(x, w),
    "conv+bias": lambda x, w, b, r: conv(x, w) + b,
    "conv+bias, bias first": lambda x, w, b, r: b + conv(x, w),
    "conv+bias, [1,1,1,C]": lambda x, w, b, r: conv(x, w) + b[None, None, None],
    "conv+bias, broadcast": lambda x, w, b, r: conv(x, w) + jnp.broadcast_to(b, r.shape),
    "conv+bias, a number": lambda x, w, b, r: conv(x, w) + 0.5,
    "conv+scale": lambda x, w, b, r: conv(x, w) * 0.5,
    "conv+scale, an array of one element": lambda x, w, b, r: b[:1].reshape(1, 1, 1, 1) * conv(x, w),
    "conv+scale+add+relu, a number": lambda x, w, b, r: jax.nn.relu(r + 0.2 * conv(x, w)),
    "conv+bias+scale+add, scaled after the bias": lambda x, w, b, r: r + b[0] * (conv(x, w) + b),
    "conv+bias+add+relu, scaled residual": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b + 0.2 * r),
    "conv+relu+add, residual scaled after the activation": lambda x, w, b, r: jax.nn.relu(conv(x, w)) + b[0] * r,
    "conv+bias+add, scaled residual read elsewhere": lambda x, w, b, r: (lambda s: (conv(x, w) + b + s, s))(0.2 * r),
    "conv+bias+relu": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b),
    "conv+bias+relu, groups of the batch": lambda x, w, b, r: jax.nn.relu(conv(x, w, batch_group_count=2) + b),
    "transpose+conv+bias, groups of the batch": lambda x, w, b, r: conv(
        x.transpose(0, 3, 1, 2), w, batch_group_count=2, dimension_numbers=("NCHW", "HWIO", "NHWC")) + b,
    "conv+relu": lambda x, w, b, r: jax.nn.relu(conv(x, w)),
    "conv+bias+maximum0": lambda x, w, b, r: jnp.maximum(conv(x, w) + b, 0),
    "conv+bias+relu6": lambda x, w, b, r: jax.nn.relu6(conv(x, w) + b),
    "conv+bias+clip6": lambda x, w, b, r: jnp.minimum(jnp.maximum(conv(x, w) + b, 0), 6),
    "conv+bias+clip, relu6 with 5": lambda x, w, b, r: jnp.minimum(jnp.maximum(conv(x, w) + b, 0), 5),
    "conv+bias+leaky_relu": lambda x, w, b, r: jax.nn.leaky_relu(conv(x, w) + b),
    "conv+bias+leaky_relu, spelled": lambda x, w, b, r: (lambda z: jnp.where(z >= 0, z, 0.1 * z))(conv(x, w) + b),
    "conv+bias+elu": lambda x, w, b, r: jax.nn.elu(conv(x, w) + b),
    "conv+bias+sigmoid": lambda x, w, b, r: jax.nn.sigmoid(conv(x, w) + b),
    "conv+bias+tanh": lambda x, w, b, r: jnp.tanh(conv(x, w) + b),
    "conv+bias+silu": lambda x, w, b, r: jax.nn.silu(conv(x, w) + b),
    "conv+bias+silu, spelled": lambda x, w, b, r: (lambda z: z / (1 + jnp.exp(-z)))(conv(x, w) + b),
    "conv+bias+gelu": lambda x, w, b, r: jax.nn.gelu(conv(x, w) + b, approximate=False),
    "conv+bias+gelu_tanh": lambda x, w, b, r: jax.nn.gelu(conv(x, w) + b),
    "conv+bias+hard_swish": lambda x, w, b, r: jax.nn.hard_swish(conv(x, w) + b),
    "conv+bias+softplus": lambda x, w, b, r: jax.nn.softplus(conv(x, w) + b),
    "conv+bias+add": lambda x, w, b, r: conv(x, w) + b + r,
    "conv+bias+add, residual first": lambda x, w, b, r: r + (conv(x, w) + b),
    "conv+bias+add, bias last": lambda x, w, b, r: conv(x, w) + r + b,
    "conv+bias+relu+add": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b) + r,
    "conv+bias+silu+add, residual first": lambda x, w, b, r: r + jax.nn.silu(b + conv(x, w)),
    "pad+conv+bias, transposed": lambda x, w, b, r: conv(
        jnp.pad(x, ((0, 0), (1, 0), (0, 1), (0, 0))), w, lhs_dilation=(2, 2), padding=((-1, 0), (0, 0))) + b,
    "conv+bias+add+relu": lambda x, w, b, r: jax.nn.relu(conv(x, w) + b + r),
    "conv+bn+relu": lambda x, w, b, r: jax.nn.relu((conv(x, w) - MEAN) * (lax.rsqrt(VAR + 1e-5) * GAMMA) + BETA),
    "conv+bn+add+relu": lambda x, w, b, r: jax.nn.relu(r + conv(x, w) * (GAMMA / jnp.sqrt(VAR + 1e-3)) + BETA),
    "conv+bias+relu, jitted": jax.jit(lambda x, w, b, r: jax.nn.relu(conv(x, w) + b)),
    "conv+bias+relu, in pieces": lambda x, w, b, r: jax.jit(jax.nn.relu)(jax.jit(jnp.add)(jax.jit(conv)(x, w), b)),
    "conv+bias+relu, strided and dilated": lambda x, w, b, r: jax.nn.relu(
        conv(x, w, window_strides=(2, 1), rhs_dilation=(1, 2), padding=((0, 1), (2, 0))) + b),
    "conv+bias+relu, depthwise": lambda x, w, b, r: jax.nn.relu(conv(x, w[:, :, :1], feature_group_count=4) + b),
    "conv+bias+relu, transposed": lambda x, w, b, r: jax.nn.relu(lax.conv_transpose(x, w, (2, 2), "SAME") + b),
    "conv+bias+silu, transposed, valid": lambda x, w, b, r: jax.nn.silu(lax.conv_transpose(x, w, (2, 3), "VALID") + b),
    "conv+bias, transposed, dilated": lambda x, w, b, r: lax.conv_transpose(x, w, (2, 2), "SAME", rhs_dilation=(2, 2)) + b,
    "conv+bias, transposed, of the gradient": lambda x, w, b, r: lax.conv_transpose(
        x, w.swapaxes(2, 3), (2, 2), "SAME", transpose_kernel=True) + b,
    "conv+relu, float16": lambda x, w, b, r: jax.nn.relu(conv(x.astype(jnp.float16), w.astype(jnp.float16))).astype(jnp.float32),
    "conv+relu, a reshape between": lambda x, w, b, r: jax.nn.relu(conv(x, w).reshape(2, 64, 8)),
    "transpose+conv+bias+relu, NCHW": lambda x, w, b, r: jax.nn.relu(
        conv(x.transpose(0, 3, 1, 2), w, dimension_numbers=("NCHW", "HWIO", "NCHW")) + b[:, None, None]),
}


@pytest.mark.parametrize("name", CONV_HITS)
def test_conv_hit(name):
    fused, skipped = patterns(CONV_HITS[name], X, W, B, R)
    assert fused == [name.split(",")[0]] and not skipped
    check_values(CONV_HITS[name], X, W, B, R, tolerance=1e-4)


def preactivation(x, w, b, r):
    total = conv(x, w) + b + r
    return jax.nn.relu(total), total


def returned(x, w, b, r):
    y = conv(x, w)
    return y, y + b


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

# name -> (function, pattern skipped, words of the reason, what is fused all the same)
CONV_MISSES = {
    "inner value returned": (returned, "conv+bias", "returned by the program", ["conv"]),
    "sum read twice": (preactivation, "conv+bias+add+relu", "returned by the program", ["conv+bias+add"]),
    "read by another": (lambda x, w, b, r: (lambda y: jax.nn.relu(y) + jnp.cos(y))(conv(x, w) + b),
                        "conv+bias+relu", "read 2 times: by custom_jvp_call", ["conv+bias"]),
    "bias along another axis": (lambda x, w, b, r: conv(x, w) + b[:, None], "conv+bias", "varies along axis 2", ["conv"]),
    "addend broadcasts": (lambda x, w, b, r: conv(x, w) + r[:1], "conv+bias", "varies along axis 1", ["conv"]),
    "scaled after the residual": (lambda x, w, b, r: (conv(x, w) + r) * b, "conv+add+scale", "scales the sum", ["conv+add"]),
    "added before and after": (lambda x, w, b, r: jax.nn.relu(conv(x, w) + r) + r, "conv+add+relu+add",
                               "adds a second full-size value", ["conv+add+relu"]),
    "transposed and strided": (lambda x, w, b, r: conv(x, w, lhs_dilation=(2, 2), window_strides=(2, 2), padding=((1, 1), (1, 1))),
                               "conv", "window_strides (2, 2) with lhs_dilation (2, 2)", []),
    "transposed, padded beyond the filter": (lambda x, w, b, r: conv(x, w, lhs_dilation=(2, 2), padding=((3, 3), (1, 1))),
                                             "conv", "the filter reaches (2, 2) only", []),
    "negative padding": (lambda x, w, b, r: conv(x, w, padding=((-1, 0), (0, 0))), "conv", "negative padding", []),
}
_NO_ROW = {
    "optimization_barrier": lambda x, w, b, r: jax.nn.relu(lax.optimization_barrier(conv(x, w))),
    "custom_vjp of the user's": lambda x, w, b, r: straight_through(conv(x, w)),
    "a reshape of the channels between": lambda x, w, b, r: jax.nn.relu(conv(x, w).reshape(2, 64 * 8)),
    "twice the value": lambda x, w, b, r: (lambda y: y + y)(conv(x, w)),
}


@pytest.mark.parametrize("name", CONV_MISSES)
def test_conv_near_miss(name):
    fn, pattern, words, still = CONV_MISSES[name]
    fused, skipped = patterns(fn, X, W, B, R)
    assert fused == still
    assert [p for p, _ in skipped] == [pattern] and words in skipped[0][1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
                 jaxfuse.fuse(fn, policy="always")(X, W, B, R), fn(X, W, B, R))


@pytest.mark.parametrize("name", _NO_ROW)
def test_conv_alone_before(name):
    assert patterns(_NO_ROW[name], X, W, B, R) == (["conv"], [])
    check_values(_NO_ROW[name], X, W, B, R, tolerance=1e-4)


def test_debug_print_between_stays(capfd):
    def fn(x, w):
        y = conv(x, w)
        jax.debug.print("sum {}", y.sum())
        return jax.nn.relu(y)

    fused, skipped = patterns(fn, X, W)
    assert fused == ["conv"] and "read 2 times" in skipped[0][1]
    jaxfuse.fuse(fn, policy="always")(X, W)
    jax.effects_barrier()
    assert capfd.readouterr().out.startswith("sum")


@pytest.mark.parametrize("border", ["scan", "cond", "remat"])
def test_across_a_border_only_inside(border):
    """A value that crosses into a loop, a branch or a rematerialised body is not fused across; the body is entered."""

    def body(y):
        return jax.nn.relu(conv(y, W[..., :4]))

    def fn(x):
        y = conv(x, W[..., :4])
        if border == "scan":
            return lax.scan(lambda c, _: (body(c), None), y, None, length=2)[0]
        if border == "cond":
            return lax.cond(x.sum() > 0, body, lambda v: v, y)
        return jax.checkpoint(body)(y)

    fused, skipped = patterns(fn, X)
    assert sorted(fused) == ["conv", "conv+relu"] and not skipped
    check_values(fn, X, tolerance=1e-4)


# --- batch norm ----------------------------------------------------------------------------------------------------

Z, ZR = 3 + 2 * randn(4, 6, 6, 8), randn(4, 6, 6, 8, seed=7)


def fast_moments(x, axes=(0, 1, 2)):
    mean = x.mean(axes)
    return mean, jnp.maximum(0, (x * x).mean(axes) - mean * mean)


def slow_moments(x, axes=(0, 1, 2)):
    return x.mean(axes), x.var(axes)


def centered(x, g, b, r):
    xc = x - x.mean((0, 1, 2))
    return jax.nn.relu(xc * lax.rsqrt((xc**2).mean((0, 1, 2)) + 1e-5) * g + b + r)


def spelled(moments, normalize):
    def fn(x, g, b, r):
        mean, var = moments(x)
        return normalize(x, mean, var, g, b, r), mean, var

    return fn


BN_HITS = {
    "bn+add+relu, E[x²]-E[x]²": spelled(fast_moments, lambda x, m, v, g, b, r: jax.nn.relu(
        (x - m) * (lax.rsqrt(v + 1e-5) * g) + b + r)),
    "bn+add+relu, jnp.var": spelled(slow_moments, lambda x, m, v, g, b, r: jax.nn.relu(
        r + (x - m) / jnp.sqrt(v + 1e-5) * g + b)),
    "bn+add+relu, folded": spelled(fast_moments, lambda x, m, v, g, b, r: jax.nn.relu(
        x * (g * lax.rsqrt(v + 1e-5)) + (b - m * g * lax.rsqrt(v + 1e-5)) + r)),
    "bn+relu": spelled(fast_moments, lambda x, m, v, g, b, r: jax.nn.relu((x - m) * lax.rsqrt(v + 1e-5) * g + b)),
    "bn+relu6": spelled(slow_moments, lambda x, m, v, g, b, r: jax.nn.relu6((x - m) * lax.rsqrt(v + 1e-5) * g + b)),
    "bn+maximum0": spelled(slow_moments, lambda x, m, v, g, b, r: jnp.maximum((x - m) * lax.rsqrt(v + 1e-5) * g + b, 0)),
    "bn": spelled(fast_moments, lambda x, m, v, g, b, r: (x - m) * lax.rsqrt(v + 1e-5)),
    "bn+add": spelled(slow_moments, lambda x, m, v, g, b, r: (x - m) * lax.rsqrt(v + 1e-5) * g + b + r),
    "bn+add+relu, shared centering": centered,
}


@pytest.mark.parametrize("name", BN_HITS)
def test_batch_norm_hit(name):
    fused, skipped = patterns(BN_HITS[name], Z, GAMMA, BETA, ZR)
    assert fused == [name.split(",")[0]] and not skipped
    check_values(BN_HITS[name], Z, GAMMA, BETA, ZR, tolerance=1e-4)


def running_average(x, g, b, r):
    mean, var = fast_moments(x)
    y = jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * g + b)
    return y, 0.9 * g + 0.1 * mean, 0.9 * b + 0.1 * var * 144 / 143


def test_statistics_are_served_from_the_outputs():
    assert patterns(running_average, Z, GAMMA, BETA, ZR) == (["bn+relu"], [])
    check_values(running_average, Z, GAMMA, BETA, ZR, tolerance=1e-4)


def self_residual(x, g, b, r):
    mean, var = fast_moments(x)
    return (x - mean) * lax.rsqrt(var + 1e-5) + r * mean


BN_MISSES = {
    "over the wrong axes": (lambda x, g, b, r: (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 1e-5),
                            "norm", "statistics over axes (0, 1)", []),
    "statistics only": (fast_moments, "bn", "nothing normalises it", []),
    "residual of its own statistics": (self_residual, "bn+add", "own statistics", ["bn"]),
    "scale along another axis": (spelled(fast_moments, lambda x, m, v, g, b, r: (x - m) * lax.rsqrt(v + 1e-5) * r[:, :1, :1]),
                                 "bn+scale", "varies along axis 0", ["bn"]),
}


@pytest.mark.parametrize("name", BN_MISSES)
def test_batch_norm_near_miss(name):
    fn, pattern, words, still = BN_MISSES[name]
    args = (Z,) if fn is fast_moments else (Z, GAMMA, BETA, ZR)
    fused, skipped = patterns(fn, *args)
    assert fused == still
    assert [p for p, _ in skipped] == [pattern] and words in skipped[0][1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
                 jaxfuse.fuse(fn, policy="always")(*args), fn(*args))
