"""Layer, RMS, group and instance norm in every framework's spelling; and near-misses."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxfuse
from recognition import fused, randn, rows, scalar

keras = pytest.importorskip("keras")
X, T, GAMMA, BETA = randn(2, 6, 6, 8), randn(2, 5, 8), randn(8), randn(8, seed=1)


def moments(x, axes):
    return x.mean(axes, keepdims=True), x.var(axes, keepdims=True)


def fast(x, axes):
    mean = x.mean(axes, keepdims=True)
    return mean, jnp.maximum((x * x).mean(axes, keepdims=True) - mean**2, 0)


def centered(x, axes):
    mean = x.mean(axes, keepdims=True)
    return mean, ((x - mean) ** 2).mean(axes, keepdims=True)


def layer_norm(x, g, b, of=moments, axes=-1):
    mean, var = of(x, axes)
    return (x - mean) * lax.rsqrt(var + 1e-5) * g + b


def normalised(x):
    mean, var = moments(x, -1)
    return (x - mean) * lax.rsqrt(var + 1e-5)


def folded(x, g, b):
    mean, var = fast(x, -1)
    factor = g * lax.rsqrt(var + 1e-5)
    return x * factor + (b - mean * factor)


def rms_norm(x, g, b):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g


def group_norm(x, g, b):
    grouped = x.reshape(2, 6, 6, 2, 4)
    mean, var = moments(grouped, (1, 2, 4))
    return ((grouped - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape) * g + b


def group_norm_channels_first(x, g, b):
    rows = x.transpose(0, 3, 1, 2).reshape(2, 2, -1)
    mean, var = moments(rows, -1)
    return ((rows - mean) / jnp.sqrt(var + 1e-5)).reshape(2, 8, 6, 6) * g[:, None, None] + b[:, None, None]


HITS = {
    "layer_norm, jnp.var": layer_norm,
    "layer_norm, E[x²]-E[x]²": lambda x, g, b: layer_norm(x, g, b, fast),
    "layer_norm, E[(x-E[x])²]": lambda x, g, b: layer_norm(x, g, b, centered),
    "layer_norm, folded": folded,
    "layer_norm, divided by the deviation": lambda x, g, b: (
        (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
    ),
    "layer_norm, over three axes": lambda x, g, b: layer_norm(x, 1.5, 0.5, axes=(1, 2, 3)),
    "layer_norm, of a matrix": lambda x, g, b: layer_norm(x.reshape(72, 8), g, b),
    "layer_norm, of a vector": lambda x, g, b: layer_norm(x[0, 0, 0], g, b),
    "layer_norm, of bf16 in f32": lambda x, g, b: layer_norm(x.astype(jnp.bfloat16).astype(jnp.float32), g, b).astype(
        jnp.bfloat16
    ),
    "layer_norm+relu": lambda x, g, b: jax.nn.relu(layer_norm(x, g, b)),
    "layer_norm+add": lambda x, g, b: x + layer_norm(jnp.sin(x), g, b),
    "add+layer_norm": lambda x, g, b: (lambda s: (layer_norm(s, g, b), s))(jnp.sin(x) + x),
    "rms_norm": rms_norm,
    "rms_norm, gamma first": lambda x, g, b: x * g * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6),
    "rms_norm+silu": lambda x, g, b: jax.nn.silu(rms_norm(x, g, b)),
    "group_norm": group_norm,
    "group_norm+silu": lambda x, g, b: jax.nn.silu(group_norm(x, g, b)),
    "group_norm, channels first": group_norm_channels_first,
    "instance_norm": lambda x, g, b: layer_norm(x, g, b, axes=(1, 2)),
    "instance_norm, channels first": lambda x, g, b: layer_norm(
        x.transpose(0, 3, 1, 2), g[:, None, None], b[:, None, None], axes=(2, 3)
    ),
}


@pytest.mark.parametrize("name", HITS)
def test_norm(name):
    expected = name.split(",")[0]
    assert fused(HITS[name], X, GAMMA, BETA) == [expected.removesuffix("+add")]


def test_group_norm_of_a_value_that_is_widened_first():
    def widened(x, g, b):
        return group_norm(x.astype(jnp.float32), g, b).astype(x.dtype)

    assert fused(widened, X.astype(jnp.bfloat16), GAMMA, BETA) == ["group_norm"]


def test_what_follows_a_norm():
    def leaky(x, g, b):
        return jax.nn.leaky_relu(layer_norm(x, g, b), 0.2)

    assert rows(HITS["layer_norm+add"], X, GAMMA, BETA)[1] == (
        "layer_norm+add", "it adds to or scales the normalised value: no kernel yet on cpu")
    assert rows(leaky, X, GAMMA, BETA) == [("layer_norm+leaky_relu", "fused")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_norm_of_what_a_layer_makes_that_is_left_to_xla(dtype):
    """The cast to float32 is the norm's, though it follows the layer."""
    x, w = randn(4, 8).astype(dtype), randn(8, 8).astype(dtype)
    report = jaxfuse.explain(lambda x, w: layer_norm((x @ w + x).astype(jnp.float32), 1.0, 0.0).astype(dtype), x, w, policy="never")
    assert [site.pattern for site in report.skipped] == ["dense+add", "layer_norm"]


def differentiated(fn, inputs=(0, 1, 2)):
    return jax.value_and_grad(scalar(fn), inputs)


def norms(fn, *args):
    """The rows of norms; those that are not fused with the reason."""
    return [pattern if reason == "fused" else (pattern, reason) for pattern, reason in rows(fn, *args) if "norm" in pattern]


@pytest.mark.parametrize("name", HITS)
def test_norm_in_a_differentiated_program(name):
    """Where autodiff has run before, the gradient is found too."""
    expected = name.split(",")[0].removesuffix("+add")
    assert norms(differentiated(HITS[name]), X, GAMMA, BETA)[:2] == [expected, f"backward {expected}"]


@pytest.mark.parametrize("name", HITS)
def test_gradient_of_a_fused_norm(name):
    loss = scalar(HITS[name])
    made, plain = (jax.jit(jax.grad(f, (0, 1, 2)))(X, GAMMA, BETA) for f in (jaxfuse.fuse(loss, policy="always"), loss))
    for value, expected in zip(made, plain):
        tolerance = 1e-4 if "bf16" not in name else 5e-2
        np.testing.assert_allclose(value, expected, tolerance, tolerance * max(1, np.abs(expected).max()))


# name -> (function, pattern, words of the reason)
MISSES = {
    "over the wrong axes": (
        lambda x, g, b: layer_norm(x, g, b, axes=(0, 1)),
        "norm",
        "statistics over axes (0, 1) of float32[2, 6, 6, 8]",
    ),
    "over the height only": (lambda x, g, b: layer_norm(x, 1.5, 0.5, axes=1), "norm", "statistics over axes (1,)"),
    "centered value returned": (
        lambda x, g, b: (layer_norm(x, g, b), x - x.mean(-1, keepdims=True)),
        "layer_norm",
        "float32[2, 6, 6, 8] is returned by the program",
    ),
    "normalised value read elsewhere": (
        lambda x, g, b: (lambda y: (y * g + b, jnp.cos(y)))(normalised(x)),
        "layer_norm",
        "is read by cos at ",
    ),
    "gamma for each example": (
        lambda x, g, b: normalised(x) * jnp.exp(x[:, :1, :1]),
        "layer_norm+scale",
        "varies along axis 0, the normalised axes are (3,)",
    ),
    "beta along another axis": (
        lambda x, g, b: normalised(x) + jnp.exp(x[:1, :, :1, :1]),
        "layer_norm+bias",
        "varies along axis 1, the normalised axes are (3,)",
    ),
}


# name -> (function, words of the reason): recognised as norms, and not what the kernel computes
UNFIT = {
    "variance of another value": (
        lambda x, g, b: (x - x.mean(-1, keepdims=True)) * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g,
        "its steps are not those of a normalisation by mean and variance",
    ),
    "cube root": (
        lambda x, g, b: x * ((x * x).mean(-1, keepdims=True) + 1e-5) ** (-1 / 3) * g,
        "its steps are not those of a normalisation by mean and variance",
    ),
    "half of the mean": (
        lambda x, g, b: (lambda mean, var: (x - 0.5 * mean) * lax.rsqrt(var + 1e-5) * g)(*moments(x, -1)),
        "its steps are not those of a normalisation by mean and variance",
    ),
    "variance below a bound": (
        lambda x, g, b: (lambda mean, var: (x - mean) * lax.rsqrt(jnp.maximum(var, 1e-3)) * g)(*moments(x, -1)),
        "its steps are not those of a normalisation by mean and variance",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_norm_that_the_kernel_does_not_compute(name):
    fn, words = UNFIT[name]
    ((pattern, reason),) = rows(fn, X, GAMMA, BETA)
    assert pattern.endswith("norm") and words in reason
    assert fused(fn, X, GAMMA, BETA) == []


def test_statistics_along_another_axis_of_equal_length():
    """Without keepdims the mean of each row is subtracted from each column: numbers fit, places do not."""
    square = randn(8, 8)

    def fn(x, g, b):
        return (x - x.mean(-1)) * lax.rsqrt(((x - x.mean(-1)) ** 2).mean(-1) + 1e-5) * g + b

    assert fused(fn, square, GAMMA, BETA) == []


@pytest.mark.parametrize("name", MISSES)
def test_norm_near_miss(name):
    fn, pattern, words = MISSES[name]
    ((found, reason),) = rows(fn, X, GAMMA, BETA)
    assert found == pattern and words in reason


@pytest.mark.parametrize(
    "fn",
    [lambda x: moments(x, -1), lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True)), lambda x: jnp.sum(x * x)],
    ids=["statistics alone", "l2 normalisation", "l2 loss"],
)
def test_no_norm(fn):
    assert rows(fn, T) == []


# --- frameworks --------------------------------------------------------------------------------------------------


def linen(module, x):
    variables = module.init(jax.random.key(0), x)
    return lambda variables, x: module.apply(variables, x), variables


def nnx_module(make):
    graph, state = nnx.split(make(nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graph, state)(x), state


def haiku(make, x):
    net = hk.without_apply_rng(hk.transform(lambda x: make()(x)))
    return net.apply, net.init(jax.random.key(0), x)


def equinox(layer, vmaps):
    def apply(arrays, x):
        fn = eqx.combine(arrays, rest)
        for _ in range(vmaps):
            fn = jax.vmap(fn)
        return fn(x)

    arrays, rest = eqx.partition(layer, eqx.is_array)
    return apply, arrays


def keras_layer(layer, x):
    layer.build(x.shape)
    return (lambda weights, x: layer.stateless_call(weights, [], x)[0]), [v.value for v in layer.trainable_variables]


FRAMEWORKS = {
    "layer_norm, linen": lambda x: linen(nn.LayerNorm(), x),
    "layer_norm, linen bf16": lambda x: linen(nn.LayerNorm(dtype=jnp.bfloat16), x),
    "layer_norm, linen slow variance": lambda x: linen(nn.LayerNorm(use_fast_variance=False), x),
    "rms_norm, linen": lambda x: linen(nn.RMSNorm(), x),
    "group_norm, linen": lambda x: linen(nn.GroupNorm(2), x),
    "instance_norm, linen": lambda x: linen(nn.InstanceNorm(), x),
    "layer_norm, nnx": lambda x: nnx_module(lambda rngs: nnx.LayerNorm(8, rngs=rngs)),
    "rms_norm, nnx": lambda x: nnx_module(lambda rngs: nnx.RMSNorm(8, rngs=rngs)),
    "group_norm, nnx": lambda x: nnx_module(lambda rngs: nnx.GroupNorm(8, 2, rngs=rngs)),
    "layer_norm, haiku": lambda x: haiku(lambda: hk.LayerNorm(-1, True, True), x),
    "rms_norm, haiku": lambda x: haiku(lambda: hk.RMSNorm(-1), x),
    "group_norm, haiku": lambda x: haiku(lambda: hk.GroupNorm(2), x),
    "instance_norm, haiku": lambda x: haiku(lambda: hk.InstanceNorm(True, True), x),
    "layer_norm, equinox": lambda x: equinox(eqx.nn.LayerNorm(8), x.ndim - 1),
    "rms_norm, equinox": lambda x: equinox(eqx.nn.RMSNorm(8), x.ndim - 1),
    "layer_norm, keras": lambda x: keras_layer(keras.layers.LayerNormalization(), x),
    "rms_norm, keras": lambda x: keras_layer(keras.layers.RMSNormalization(), x),
    "group_norm, keras": lambda x: keras_layer(keras.layers.GroupNormalization(2), x),
}


@pytest.mark.parametrize("x", [X, T], ids=["images", "tokens"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_norm_of_a_framework(name, x):
    apply, weights = FRAMEWORKS[name](x)
    pattern = name.split(",")[0]
    assert fused(apply, weights, x) == [pattern]
    assert norms(differentiated(apply, (0, 1)), weights, x) == [pattern, f"backward {pattern}"]


@pytest.mark.parametrize("x", [X.transpose(0, 3, 1, 2), T.transpose(0, 2, 1)], ids=["images", "tokens"])
def test_equinox_group_norm(x):
    """Channels first; also of a single example, without vmap."""
    apply, weights = equinox(eqx.nn.GroupNorm(2, 8), 1)
    assert fused(apply, weights, x) == ["group_norm"]
    assert norms(differentiated(apply, (0, 1)), weights, x) == ["group_norm", "backward group_norm"]
    assert fused(lambda x: eqx.nn.GroupNorm(2, 8)(x), x[0]) == ["group_norm"]


MOVED = {
    "in the end": lambda x, g, b: jnp.swapaxes(layer_norm(x, g, b), 0, 1),
    "and reshaped": lambda x, g, b: jnp.swapaxes(layer_norm(x, g, b), 1, 2).reshape(2, -1, 8),
    "a group norm's": lambda x, g, b: group_norm(x, g, b).transpose(3, 0, 1, 2),
    "before what follows": lambda x, g, b: 2 * jnp.swapaxes(group_norm(x, g, b), 0, 1),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_result_that_is_transposed(name):
    assert len(fused(MOVED[name], X, GAMMA, BETA)) == 1


def test_a_value_that_is_transposed_inside():
    def inner(x, g, b):
        mean, var = moments(x, -1)
        return jnp.swapaxes((x - mean) * lax.rsqrt(var + 1e-5), 0, 1) * g + b

    ((pattern, reason),) = rows(inner, X, GAMMA, BETA)
    assert pattern == "layer_norm" and "has the elements of float32[2, 6, 6, 8] in another order" in reason
