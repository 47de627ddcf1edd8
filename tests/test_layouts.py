"""What only moves data around a convolution or a batch norm: pads, transposes, reshapes, vmap; and what of it must stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from jaxfuse.analysis.layout import Layout
from jaxfuse.program.graph import Graph
from test_patterns import B, BETA, GAMMA, R, W, X, Z, ZR, check_values, conv, patterns, randn

NCHW = ("NCHW", "OIHW", "NCHW")


def pad(x, *config, value=0.0):
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def first(x):
    return x.transpose(0, 3, 1, 2)


def last(x):
    return x.transpose(0, 2, 3, 1)


def valid(x, w):
    return conv(x, w, padding="VALID")


HITS = {
    "pad+conv": lambda x, w, b, r: valid(pad(x, (0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0)), w),
    "pad+conv, asymmetric": lambda x, w, b, r: conv(
        jnp.pad(x, ((0, 0), (0, 1), (2, 0), (0, 0))), w, window_strides=(2, 2), padding=((1, 0), (0, 1))),
    "pad+pad+conv+bias+relu": lambda x, w, b, r: jax.nn.relu(
        valid(jnp.pad(jnp.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0))), ((0, 0), (0, 0), (1, 1), (0, 0))), w) + b),
    "transpose+conv+transpose": lambda x, w, b, r: last(conv(first(x), w.transpose(3, 2, 0, 1), dimension_numbers=NCHW)),
    "transpose+conv+bias+add+relu+transpose": lambda x, w, b, r: jax.nn.relu(last(
        conv(first(x), w.transpose(3, 2, 0, 1), dimension_numbers=NCHW) + b[:, None, None]) + r),
    "transpose+conv+bias+relu+transpose, activation first": lambda x, w, b, r: last(jax.nn.relu(
        conv(first(x), w.transpose(3, 2, 0, 1), dimension_numbers=NCHW) + b[:, None, None])),
    "transpose+pad+conv": lambda x, w, b, r: conv(
        jnp.pad(first(x), ((0, 0), (0, 0), (1, 1), (1, 1))), w, padding="VALID", dimension_numbers=("NCHW", "HWIO", "NHWC")),
    "conv+bias+relu, squeezed": lambda x, w, b, r: jax.nn.relu(
        lax.conv_general_dilated(x[:, :, :1], w[:, :1], (1, 1), ((1, 1), (0, 0)), dimension_numbers=("NHWC", "HWIO", "NHWC"))
        .squeeze(2) + b),
    "conv+bias+add+relu, positions merged": lambda x, w, b, r: jax.nn.relu(
        (conv(x, w).reshape(2, 64, 8) + b + r.reshape(2, 64, 8)).reshape(2, 8, 8, 8)),
    "conv+bias+relu, vmap over images": lambda x, w, b, r: jax.vmap(
        lambda one: jax.nn.relu(conv(one[None], w)[0] + b))(x),
    "conv+bias+add+relu, vmap over batches": lambda x, w, b, r: jax.vmap(
        lambda a, s: jax.nn.relu(conv(a, w) + b + s), 1, 1)(jnp.stack([x, 2 * x], 1), jnp.stack([r, 3 * r], 1)),
    "conv+bias+relu, vmap over weights": lambda x, w, b, r: jax.vmap(
        lambda v, c: jax.nn.relu(conv(x, v) + c))(jnp.stack([w, -w]), jnp.stack([b, 2 * b])),
    "conv+bias+relu, vmap over all": lambda x, w, b, r: jax.vmap(
        lambda a, v, c: jax.nn.relu(conv(a, v) + c))(jnp.stack([x, 2 * x]), jnp.stack([w, -w]), jnp.stack([b, 2 * b])),
}


@pytest.mark.parametrize("name", HITS)
def test_hit(name):
    fused, skipped = patterns(HITS[name], X, W, B, R)
    assert (fused, skipped) == ([name.split(",")[0]], [])
    check_values(HITS[name], X, W, B, R, tolerance=1e-4)


# name -> (function, pattern skipped, words of the reason, what is fused all the same)
MISSES = {
    "pads with one": (lambda x, w, b, r: valid(pad(x, (0, 0, 0), (1, 1, 0), (1, 1, 0), (0, 0, 0), value=1.0), w),
                      "pad+conv", "pads with 1.0, the kernel with 0", ["conv"]),
    "pads with a parameter": (lambda x, w, b, r: conv(lax.pad(x, b[0], ((0, 0, 0), (1, 1, 0), (0, 0, 0), (0, 0, 0))), w),
                              "pad+conv", "pads with a computed value", ["conv"]),
    "crops": (lambda x, w, b, r: conv(pad(x, (0, 0, 0), (-1, 1, 0), (0, 0, 0), (0, 0, 0)), w),
              "pad+conv", "padding (-1, 1, 0) along axis 1", ["conv"]),
    "pads in between": (lambda x, w, b, r: conv(pad(x, (0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0)), w),
                        "pad+conv", "padding (0, 0, 1) along axis 1", ["conv"]),
    "pads the channels": (lambda x, w, b, r: conv(pad(x[..., :2], (0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 1, 0)), w),
                          "pad+conv", "along axis 3, which is not spatial", ["conv"]),
    "bias along the squeezed axis": (lambda x, w, b, r: conv(x, w).reshape(2, 64, 8) + r.reshape(-1)[:64, None],
                                     "conv+bias", "varies along axis 1, the channel axis is 2", ["conv"]),
    "the channels are squeezed away": (lambda x, w, b, r: conv(x, w[..., :1]).squeeze(3) + b,
                                       "conv+bias", "varies along axis 2, the channel axis is squeezed away", ["conv"]),
    "addend broadcast to full size": (lambda x, w, b, r: conv(x, w) + jnp.broadcast_to(r[:1], r.shape),
                                      "conv+bias", "varies along axis 1", ["conv"]),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_miss(name):
    fn, pattern, words, still = MISSES[name]
    fused, skipped = patterns(fn, X, W, B, R)
    assert fused == still
    assert [p for p, _ in skipped] == [pattern] and words in skipped[0][1]
    check_values(fn, X, W, B, R, tolerance=1e-4)


def test_channels_that_are_merged_end_the_chain():
    assert patterns(lambda x, w: jax.nn.relu(conv(x, w).reshape(2, 512)), X, W) == (["conv"], [])


BLOCKED = "space_to_batch+conv+batch_to_space"


def into_batch(x, r, s):
    n, h, w, c = x.shape
    x = x.reshape(n, h // r, r, w // s, s, c).transpose(2, 4, 0, 1, 3, 5)
    return x.reshape(r * s * n, h // r, w // s, c)


def out_of_batch(y, r, s, order=(2, 3, 0, 4, 1, 5)):
    n, h, w, c = y.shape
    return y.reshape(r, s, n // (r * s), h, w, c).transpose(order).reshape(n // (r * s), h * r, w * s, c)


def blocked(x, w, r=2, s=2, **options):
    return out_of_batch(conv(into_batch(x, r, s), w, **options), r, s)


def blocked_channels_first(x, w):
    n, c = x.shape[0], w.shape[3]
    x = first(x).reshape(n, 4, 4, 2, 4, 2).transpose(3, 5, 0, 1, 2, 4).reshape(4 * n, 4, 4, 4)
    y = conv(x, w, dimension_numbers=("NCHW", "HWIO", "NCHW"))
    return last(y.reshape(2, 2, n, c, 4, 4).transpose(2, 3, 4, 0, 5, 1).reshape(n, c, 8, 8))


def whole_blocks(x, w, b):
    """As TensorFlow has it: pads to whole blocks of 3, and gives back what was too much."""
    y = blocked(jnp.pad(x, ((0, 0), (3, 4), (3, 4), (0, 0))), w, 3, 3, padding="VALID")[:, :8, :8]
    return jax.nn.relu(y + b)


# name -> (function, what is fused, the same with rhs_dilation)
DILATED = {
    "one block for both": (lambda x, w, b: blocked(x, w), BLOCKED, lambda x, w, b: conv(x, w, rhs_dilation=(2, 2))),
    "each its own, of a dilated one": (lambda x, w, b: blocked(x, w, 4, 2, rhs_dilation=(1, 2)), BLOCKED,
                                       lambda x, w, b: conv(x, w, rhs_dilation=(4, 4))),
    "channels first": (lambda x, w, b: blocked_channels_first(x, w), f"transpose+{BLOCKED}+transpose",
                       lambda x, w, b: conv(x, w, rhs_dilation=(2, 2))),
    "pads and crops": (whole_blocks, f"pad+{BLOCKED}+crop+bias+relu",
                       lambda x, w, b: jax.nn.relu(conv(x, w, rhs_dilation=(3, 3)) + b)),
}


@pytest.mark.parametrize("name", DILATED)
def test_space_to_batch(name):
    """A dilated convolution spelled as one of a batch of every r-th pixel."""
    fn, label, plain = DILATED[name]
    assert patterns(fn, X, W, B) == ([label], [])
    np.testing.assert_allclose(jaxfuse.fuse(fn, policy="always")(X, W, B), plain(X, W, B), rtol=1e-4, atol=1e-4)


# name -> (function, pattern skipped, words of the reason)
NOT_DILATED = {
    "not back": (lambda x, w: out_of_batch(conv(into_batch(x, 2, 2), w), 2, 2, (2, 3, 1, 4, 0, 5)), BLOCKED, "blocks of (2, 2)"),
    "back in other blocks": (lambda x, w: out_of_batch(conv(into_batch(x, 2, 2), w), 4, 1), BLOCKED, "blocks of (2, 2)"),
    "strides": (lambda x, w: out_of_batch(conv(into_batch(x, 2, 2), w, window_strides=(2, 2)), 2, 2), BLOCKED,
                "window_strides (2, 2)"),
    "the output in blocks is read too": (lambda x, w: (lambda y: (out_of_batch(y, 2, 2), y))(conv(into_batch(x, 2, 2), w)),
                                         BLOCKED, "not moved back"),
    "rows of the batch in a block": (lambda x, w: out_of_batch(conv(into_batch(x.reshape(1, 16, 8, 4), 2, 2), w), 2, 2, (
        0, 3, 2, 4, 1, 5)), BLOCKED, "not moved back"),
}


@pytest.mark.parametrize("name", NOT_DILATED)
def test_no_space_to_batch(name):
    fn, *expected = NOT_DILATED[name]
    fused, [(pattern, reason)] = patterns(fn, X, W)
    assert fused == ["conv"] and pattern == expected[0] and expected[1] in reason
    check_values(fn, X, W, tolerance=1e-4)


def test_what_is_cropped_without_padding_stays_a_slice():
    fused, _ = patterns(lambda x, w: blocked(x, w, padding="VALID")[:, 1:], X, W)
    assert fused == [BLOCKED]


# --- batch norm ----------------------------------------------------------------------------------------------------


def norm(x, axes, g, b, r):
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5) * g + b + r), mean, var


def under_vmap(x, g, b, r):
    """Equinox: one image at a time, channels first, means of means."""

    def one(x, r):
        mean = lax.pmean(x.mean((1, 2)), "batch")[:, None, None]
        var = lax.pmean(jnp.square(x - mean).mean((1, 2)), "batch")[:, None, None]
        return jax.nn.relu((x - mean) / jnp.sqrt(jnp.maximum(var, 0) + 1e-5) * g[:, None, None] + b[:, None, None] + r), mean

    return jax.vmap(one, axis_name="batch", out_axes=(0, None))(first(x), first(r))


def of_squares_under_vmap(x, g, b, r):
    """Haiku with `cross_replica_axis`: E[x²] - E[x]², each a mean of means."""

    def one(x):
        mean = lax.pmean(x.mean((0, 1), keepdims=True), "batch")
        var = lax.pmean(jnp.square(x).mean((0, 1), keepdims=True), "batch") - jnp.square(mean)
        return jax.nn.relu((x - mean) * (g * lax.rsqrt(var + 1e-5)) + b)

    return jax.vmap(one, axis_name="batch")(x)


def stacked_under_vmap(x, g, b, r):
    """Flax with `axis_name`: one pmean for both."""

    def one(x):
        both = lax.pmean(jnp.stack([x.mean((0, 1)), jnp.square(x).mean((0, 1))]), "batch")
        mean, var = both[0], jnp.maximum(0, both[1] - jnp.square(both[0]))
        return jax.nn.relu((x - mean) * (g * lax.rsqrt(var + 1e-5)) + b)

    return jax.vmap(one, axis_name="batch")(x)


BN_HITS = {
    "bn+add+relu, channels first": lambda x, g, b, r: norm(first(x), (0, 2, 3), g[:, None, None], b[:, None, None], first(r)),
    "bn+add+relu, channels in the middle": lambda x, g, b, r: norm(
        x.transpose(0, 1, 3, 2), (0, 1, 3), g[:, None], b[:, None], r.transpose(0, 1, 3, 2)),
    "bn+add+relu, mean of means": under_vmap,
    "bn+relu, mean of means of squares": of_squares_under_vmap,
    "bn+relu, one mean of both means": stacked_under_vmap,
    "bn+add+relu, unbiased": lambda x, g, b, r: jax.nn.relu(
        (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2), ddof=1) + 1e-5) * g + b + r),
}


@pytest.mark.parametrize("name", BN_HITS)
def test_batch_norm_hit(name):
    fused, skipped = patterns(BN_HITS[name], Z, GAMMA, BETA, ZR)
    assert (fused, skipped) == ([name.split(",")[0]], [])
    check_values(BN_HITS[name], Z, GAMMA, BETA, ZR, tolerance=1e-4)


def test_statistics_rounded_to_bfloat16():
    """Haiku on bfloat16: each statistic is computed in float32 and rounded. Those of a rounded x are not x's own."""

    def fn(x, g, b):
        mean, squares = x.mean((0, 1, 2)), jnp.square(x).mean((0, 1, 2))
        return (x - mean) * lax.rsqrt(squares - jnp.square(mean) + 1e-5) * g + b

    narrow = [a.astype(jnp.bfloat16) for a in (Z, GAMMA, BETA)]
    assert patterns(fn, *narrow) == (["bn"], [])

    def of_rounded(x):
        rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
        return (x - rounded.mean((0, 1, 2))) * lax.rsqrt(rounded.var((0, 1, 2)) + 1e-5)

    fused, ((pattern, reason),) = patterns(of_rounded, Z)
    assert (fused, pattern) == ([], "bn") and "nothing normalises it" in reason


def test_masked_batch_norm_is_refused():
    def fn(x, g, b, r):
        mask = jnp.arange(6)[None, :, None, None] < 4
        mean = x.mean((0, 1, 2), where=mask)
        var = (x * x).mean((0, 1, 2), where=mask) - mean * mean
        return (x - mean) * lax.rsqrt(var + 1e-5) * g + b

    fused, ((pattern, reason),) = patterns(fn, Z, GAMMA, BETA, ZR)
    assert (fused, pattern) == ([], "bn") and "leaves elements out of the statistics" in reason


def test_no_transposes_between_fused_ops_that_are_channels_first():
    """conv, batch norm, conv, all NCHW: what one fused op gives channels-last, the next reads channels-last."""
    v = 0.2 * randn(3, 3, 8, 8)

    def fn(x, w, v, g, b, r):
        y = conv(first(x), w, dimension_numbers=("NCHW", "HWIO", "NCHW"))
        y, *_ = norm(y, (0, 2, 3), g[:, None, None], b[:, None, None], first(r))
        return last(conv(y, v, dimension_numbers=("NCHW", "HWIO", "NCHW")))

    args = X, W, v, GAMMA, BETA, R
    fused, skipped = patterns(fn, *args)
    assert fused == ["transpose+conv", "bn+add+relu", "conv+transpose"] and not skipped
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(jaxfuse.fuse(fn, policy="always")(*a))), (0, 1, 2, 5))
    assert " transpose(" not in jax.jit(gradient).lower(*args).compile().as_text()
    check_values(fn, *args, tolerance=2e-4)


@pytest.mark.parametrize("seed", range(60))
def test_a_layout_is_what_it_says(seed):
    """Random transposes and reshapes: `place` does the same, `undo` undoes it, `axes` finds every axis of the origin."""
    rng = np.random.default_rng(seed)
    x = np.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)

    def moved(x):
        for _ in range(rng.integers(1, 5)):
            split = [n for n in x.shape for n in ([2, n // 2] if n in (4, 6) and rng.random() < 0.4 else [n])]
            merged = [split[0] * split[1], *split[2:]] if rng.random() < 0.3 and len(split) > 1 else split
            x = x.reshape([1] * (rng.random() < 0.3) + merged)
            x = x.transpose(rng.permutation(x.ndim)) if rng.random() < 0.7 else x
        return x

    graph = Graph(jax.make_jaxpr(moved)(x))
    layout, array = Layout.of(x.shape), x
    for node in graph.nodes:
        layout = layout.then(node)
        if layout is None:  # a reshape that tears what a transpose has moved, or axes of x that were merged
            return
        (array,) = node.replay([array])
        np.testing.assert_array_equal(layout.place(x), array)
        np.testing.assert_array_equal(layout.undo(np.asarray(array), range(4)), x)
        for axis in range(4):
            axes = layout.axes(axis)
            if axes is not None:  # reading along the other axes, the channels stay what they are
                index = np.indices(x.shape)[axis]
                rows = np.moveaxis(np.asarray(layout.place(index)), axes, range(len(axes))).reshape(x.shape[axis], -1)
                assert (rows == np.arange(x.shape[axis])[:, None]).all()
