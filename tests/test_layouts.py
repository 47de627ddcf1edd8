"""What only moves data, beside the spellings: convolutions of blocks in the batch, no transposes between fused ops, layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compare import same
from jaxfuse.analysis.layout import Layout
from jaxfuse.program.graph import Graph
from layers import BETA, GAMMA, B, R, W, X, Z, conv, randn
from recognition import correct_with_gradients, fuse, patterns
from spellings.batch_norm import norm
from spellings.layouts import first, last


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
    same(fuse(fn)(X, W, B), plain(X, W, B))


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
    correct_with_gradients(fn, X, W)


def test_what_is_cropped_without_padding_stays_a_slice():
    fused, _ = patterns(lambda x, w: blocked(x, w, padding="VALID")[:, 1:], X, W)
    assert fused == [BLOCKED]


# --- batch norm ----------------------------------------------------------------------------------------------------


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
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(fuse(fn)(*a))), (0, 1, 2, 5))
    assert " transpose(" not in jax.jit(gradient).lower(*args).compile().as_text()
    correct_with_gradients(fn, *args)


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
