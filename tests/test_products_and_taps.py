"""Convolutions that a product of matrices or a sum of taps computes, in plain JAX; and what is left to the other kernels."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfuse
from cases import conv as case
from compare import as_near_to_the_truth, by_xla, fused, jit, with_cotangents
from exact import in_float64
from jaxfuse.ops.conv import pointwise
from jaxfuse.patterns.conv.forward import config_of
from jaxfuse.program.graph import Graph
from layers import randn
from recognition import correct, explain

FIRST, LAST = ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")
row = functools.partial(case, terms="bias", activation="silu")

# kernel -> cases, and what is not in the lowered program
SCATTERED = [  # transposed, of few outputs
    row("window of four blocks", (2, 9, 5), (8, 5, 1), lhs_dilation=(2,), padding=((7, 7),)),
    row("same", (2, 6, 5, 4), (4, 3, 4, 3), lhs_dilation=(2, 2), padding=((2, 2), (2, 1))),
    row("padding all in front", (1, 5, 5, 4), (3, 3, 4, 2), lhs_dilation=(2, 3), padding=((2, 0), (0, 1))),
    row("beyond the window", (2, 5, 3), (2, 3, 2), lhs_dilation=(3,), padding=((1, 2),)),
    row("cropped", (2, 7, 3), (5, 3, 2), lhs_dilation=(2,), padding=((-1, 1),)),
    row("one axis with lhs_dilation", (2, 4, 5, 3), (3, 2, 3, 2), lhs_dilation=(1, 2), padding=((2, 2), (1, 1))),
    row("three dimensions", (1, 3, 2, 4, 3), (3, 2, 4, 3, 1), lhs_dilation=(2, 2, 2), padding=((1, 2), (1, 1), (2, 2))),
    row("channels first", (2, 3, 6, 4), (2, 3, 4, 4), lhs_dilation=(2, 2), padding=((2, 2), (1, 2)), dimension_numbers=FIRST),
]
TAPS = [  # of one channel with one filter
    row("even, valid", (3, 5, 5, 1), (2, 2, 1, 1), padding="VALID"),
    row("padded more on one side", (2, 6, 5, 1), (3, 2, 1, 1), padding=((2, 0), (0, 1))),
    row("dilated", (2, 9, 8, 1), (3, 2, 1, 1), rhs_dilation=(2, 3)),
    row("sequence", (2, 11, 1), (5, 1, 1)),
    row("three dimensions", (1, 4, 5, 3, 1), (2, 3, 1, 1, 1)),
    row("channels first", (2, 1, 6, 4), (1, 1, 3, 3), dimension_numbers=FIRST),
    row("no output", (2, 2, 1), (3, 1, 1), padding="VALID"),
]
POINTWISE = [  # by a filter of one place, channels first
    row("one image", (1, 6, 24, 22), (5, 6, 1, 1), padding="VALID", dimension_numbers=FIRST),
    row("two images", (2, 6, 24, 22), (5, 6, 1, 1), padding="VALID", dimension_numbers=FIRST),
]
CASES = {f"{kernel}, {c.name}": (c, kernel) for kernel, table in dict(scattered=SCATTERED, taps=TAPS, pointwise=POINTWISE).items()
         for c in table}
ABSENT = dict(scattered=("jaxfuse_conv", "lhs_dilate"), taps=("jaxfuse_conv", "stablehlo.convolution"),
              pointwise=("jaxfuse_conv", "stablehlo.convolution"))
DTYPES = [(name, dtype) for name, (_, kernel) in CASES.items() for dtype in ("float32", "bfloat16")
          if (kernel, dtype) != ("pointwise", "bfloat16")]


@pytest.mark.parametrize("name, dtype", DTYPES)
def test_as_near_to_the_truth_as_xla_with_its_gradients(name, dtype):
    convolution, kernel = CASES[name]
    args = with_cotangents(convolution, convolution.inputs(dtype))
    lowered = fused(convolution).lower(*args)
    assert not any(word in lowered.as_text() for word in ABSENT[kernel])
    as_near_to_the_truth(lowered.compile()(*args), *by_xla(convolution, dtype))


# --- what is left to the other kernels -----------------------------------------------------------------------------

X, W, B = randn(2, 6, 24, 22), randn(5, 6, 1, 1), randn(5, seed=1)


def layer(x, w, b, strides=(1, 1), padding="VALID", names=FIRST, **options):
    y = lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=names, **options)
    return jax.nn.silu(y + jnp.expand_dims(b, [d for d in range(y.ndim) if d != names[2].index("C")]))


def kernels(fn, *args, direction="forward"):
    return [site.kernel for site in explain(fn, *args).fused if site.direction == direction]


def test_transposed_filter_and_one_dimension():
    transposed = lambda x, w, b: layer(x, w.transpose(2, 3, 1, 0), b, names=("NCHW", "HWIO", "NCHW"))
    sequence = lambda x, w, b: layer(x.reshape(2, 6, 528), w[..., 0], b, (1,), "SAME", names=("NCH", "OIH", "NCH"))
    for program in (layer, transposed, sequence):
        assert kernels(program, X, W, B) == ["pointwise"]
        correct(program, X, W, B)


MISSES = {
    "channels last": (dict(names=LAST), X.transpose(0, 2, 3, 1), W.transpose(2, 3, 1, 0), "channels first"),
    "strides": (dict(strides=(2, 1)), jnp.tile(X, (1, 1, 2, 1)), W, "window_strides (2, 1)"),
    "padding": (dict(padding=((1, 0), (0, 0))), X, W, "padding ((1, 0), (0, 0))"),
    "larger filter": ({}, X, jnp.tile(W, (1, 1, 2, 1)), "one tap"),
    "groups": (dict(feature_group_count=3), X, jnp.tile(W[:, :2], (3, 1, 1, 1))[:6], "feature_group_count 3"),
    "few places": ({}, X[:, :, :22], W, "484 spatial positions"),
    "more features than places": ({}, X, jnp.tile(W, (106, 1, 1, 1)), "530 features, 528 spatial positions"),
    "bfloat16": ({}, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), "dtype bfloat16"),
}


@pytest.mark.parametrize("name", MISSES)
def test_pointwise_near_miss(name):
    options, x, w, words = MISSES[name]
    features = w.shape[3 if options.get("names") == LAST else 0]
    program = functools.partial(layer, **options)
    args = x, w, randn(features).astype(x.dtype)
    (node,) = [n for n in Graph(jax.make_jaxpr(program)(*args)).nodes if n.primitive == "conv_general_dilated"]
    assert words in pointwise.refuse(config_of(node), x, w)
    assert "pointwise" not in kernels(program, *args)


def test_scattered_is_for_few_outputs_of_one_group():
    config = dict(window_strides=(1,), padding=((3, 3),), lhs_dilation=(2,))
    x = jnp.zeros((1, 4, 8))

    def kernel(w, **options):
        return kernels(lambda x, w: lax.conv_general_dilated(
            x, w, dimension_numbers=("NWC", "WIO", "NWC"), **(config | options)), x, w)

    assert kernel(jnp.zeros((4, 8, 7))) == ["scattered"]
    others = (kernel(jnp.zeros((4, 8, 8))), kernel(jnp.zeros((4, 4, 2)), feature_group_count=2),
              kernel(jnp.zeros((4, 8, 2)), rhs_dilation=(2,)))
    assert all(names in (["onednn"], []) for names in others)
    assert kernel(jnp.zeros((4, 8, 2)), lhs_dilation=(1,)) in (["onednn"], [])


def test_taps_are_for_one_channel_and_few_taps():
    """More channels, a stride, a spread x or many taps are for the other kernels; so is the gradient of a large x."""

    def taps(x, w, strides=(1, 1), backward=False, **options):
        def layer(x, w):
            return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=LAST, **options).sum()

        program = jax.grad(layer, (0, 1)) if backward else layer
        return "taps" in kernels(program, jnp.zeros(x), jnp.zeros(w), direction="backward" if backward else "forward")

    small, three = (1, 6, 6, 1), (3, 3, 1, 1)
    assert taps(small, three) and taps(small, three, backward=True) and taps((1, 64, 64, 1), three)
    assert not taps((1, 64, 64, 1), three, backward=True)
    assert not taps((1, 6, 6, 2), (3, 3, 2, 1)) and not taps(small, (3, 3, 1, 2))
    assert not taps((1, 6, 6, 2), (3, 3, 1, 2), feature_group_count=2)
    assert not taps(small, three, (2, 1)) and not taps(small, (9, 8, 1, 1))


def test_gradients_of_every_sample_are_one_program_of_taps():
    """Of x, and of a filter that all samples share, which has no batch axis: no loop over the samples."""
    x, w = randn(3, 3, 5, 5, 1), randn(2, 2, 1, 1)

    def of_each(function):
        return jax.vmap(jax.grad(lambda x, w: (function(x, w) ** 3).sum(), (0, 1)), (0, None))

    def plain(x, w):
        return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=LAST))

    made = of_each(jaxfuse.fuse(plain))
    assert "scan" not in str(jax.make_jaxpr(made)(x, w))
    as_near_to_the_truth(jit(made)(x, w), jit(of_each(plain))(x, w), in_float64(of_each(plain), x, w))
