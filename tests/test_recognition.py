"""Dense layers, gates and groups of layers are recognised, in every framework's spelling."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import jaxfuse
from recognition import FUSED, randn, recognised, rows

keras = pytest.importorskip("keras")
X, W, V, B, R = randn(2, 5, 8), randn(8, 16), randn(8, 16, seed=1), randn(16), randn(2, 5, 16)
ACTIVATIONS = ["relu", "relu6", "leaky_relu", "elu", "silu", "gelu", "hard_swish", "softplus", "tanh", "sigmoid"]


def bf16(*arrays):
    return [a.astype(jnp.bfloat16) for a in arrays]


DENSE_HITS = {
    "dense": lambda x, w, v, b, r: x @ w,
    "dense+bias": lambda x, w, v, b, r: x @ w + b,
    "dense+bias, bias first": lambda x, w, v, b, r: b[None, None] + x @ w,
    "dense+bias, computed weight": lambda x, w, v, b, r: x[0] @ (w + v) + b,
    "dense+bias, a vector": lambda x, w, v, b, r: x[0, 0] @ w + b,
    "dense, a scale": lambda x, w, v, b, r: (x @ w) / 4,
    "dense+bias+add": lambda x, w, v, b, r: r + (x @ w + b),
    "dense+bias+add+relu": lambda x, w, v, b, r: jax.nn.relu(x @ w + b + r),
    "dense, a factor for each output": lambda x, w, v, b, r: jax.nn.relu((x @ w) * jnp.exp(b) + b),
    "dense+bias+gelu": lambda x, w, v, b, r: jax.nn.gelu(x @ w + b, approximate=False),
    "dense+bias+relu, transposed weight": lambda x, w, v, b, r: jax.nn.relu(jnp.einsum("btk,nk->btn", x, w.T) + b),
    "dense+bias+relu, transposed input": lambda x, w, v, b, r: jax.nn.relu(
        jnp.einsum("kbt,kn->btn", x.transpose(2, 0, 1) * 2, w) + b
    ),
    "dense+bias+relu, weight first": lambda x, w, v, b, r: jax.nn.relu(jax.vmap(jax.vmap(lambda x: w.T @ x))(x) + b),
    "dense+bias, heads": lambda x, w, v, b, r: jnp.einsum("btk,knh->btnh", x, w.reshape(8, 2, 8)) + b.reshape(2, 8),
    "dense+bias, several contracted axes": lambda x, w, v, b, r: (
        jnp.einsum("btnk,nkm->btm", x.reshape(2, 5, 2, 4), w.reshape(2, 4, 16)) + b
    ),
    "dense+bias+tanh, bf16 in, f32 out": lambda x, w, v, b, r: jnp.tanh(
        lax.dot_general(*bf16(x, w), (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32) + b
    ),
    "dense+bias+tanh, bf16 in between": lambda x, w, v, b, r: jnp.tanh(bf16(x)[0] @ bf16(w)[0] + bf16(b)[0]).astype(
        jnp.float32
    ),
    "dense x2": lambda x, w, v, b, r: (x @ w, x @ v),
    "dense+bias x3": lambda x, w, v, b, r: ((x @ w + b) / 4, x @ v + b, x @ (w + v) + b),
    "dense+silu+gate": lambda x, w, v, b, r: jax.nn.silu(x @ w) * (x @ v),
    "dense+silu+gate, linear first": lambda x, w, v, b, r: (x @ v) * jax.nn.silu(x @ w),
    "dense+bias+gelu_tanh+gate": lambda x, w, v, b, r: jax.nn.gelu(x @ w + b) * (x @ v + b),
    "dense+sigmoid+gate, jax.nn.glu": lambda x, w, v, b, r: jax.nn.glu(x @ w),
    "dense+bias+silu+gate, one weight": lambda x, w, v, b, r: (lambda u, v: v * jax.nn.silu(u))(
        *jnp.split(x @ w + b, 2, -1)
    ),
}


@pytest.mark.parametrize("name", DENSE_HITS)
def test_dense(name):
    assert recognised(DENSE_HITS[name], X, W, V, B, R) == [name.split(",")[0]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_with_each_activation(activation):
    function = getattr(jnp, activation, None) or getattr(jax.nn, activation)
    name = {"gelu": "gelu_tanh"}.get(activation, activation)
    assert recognised(lambda x, w, b: function(x @ w + b), X, W, B) == [f"dense+bias+{name}"]


def silu_returned(x, w, v, b, r):
    gate = jax.nn.silu(x @ w)
    return gate * (x @ v), gate


# name -> (function, rows)
DENSE_MISSES = {
    "bias along another axis": (
        lambda x, w, v, b, r: x @ w + r[:1, :, :1],
        [("dense", FUSED), ("dense+bias", "operand float32[1, 5, 1] varies along axis 1, the channel axis is 2")],
    ),
    "inner value returned": (
        lambda x, w, v, b, r: (lambda y: (y, y + b))(x @ w),
        [("dense", FUSED), ("dense+bias", "float32[2, 5, 16] is returned by the program")],
    ),
    "sum read twice": (
        lambda x, w, v, b, r: (lambda y: jax.nn.relu(y) + jnp.cos(y))(x @ w + b),
        [("dense+bias", FUSED), ("dense+bias+relu", "float32[2, 5, 16] is read 2 times: by custom_jvp_call at ")],
    ),
    "silu with 1.1": (
        lambda x, w, v, b, r: (lambda z: z * jax.nn.sigmoid(1.1 * z))(x @ w + b),
        [("dense+bias", FUSED), ("dense+bias+silu", "resembles silu, but")],
    ),
    "weight first and bias in columns": (
        lambda x, w, v, b, r: w.T @ x[0].T + b[:, None],
        [("dense+bias", "has its weight on the left and makes columns: the kernel writes rows")],
    ),
    "contracted axes apart": (
        lambda x, w, v, b, r: jnp.einsum("btk,bkn->tn", x, jnp.stack([w, v])) + b,
        [("dense+bias", "do not lie one after the other: no matrix in memory")],
    ),
    "bf16-math asked for": (
        lambda x, w, v, b, r: jnp.dot(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32) + b,
        [("dense+bias", "the kernel computes in its operands' dtype")],
    ),
    "gate of another function": (lambda x, w, v, b, r: jnp.sin(x @ w) * (x @ v), [("dense", FUSED), ("dense+gate", "sin at ")]),
    "gate read elsewhere": (silu_returned, [("dense+silu", FUSED), ("dense+silu+gate", "float32[2, 5, 16] is returned by the program")]),
    "gate of another input": (
        lambda x, w, v, b, r: jax.nn.silu(x @ w) * ((x + 1) @ v),
        [("dense+silu", FUSED), ("dense", FUSED)],
    ),
    "another contraction of one input": (
        lambda x, w, v, b, r: (x @ w, x.transpose(0, 2, 1) @ randn(5, 16)),
        [("dense", FUSED)] * 2,
    ),
    "integers": (
        lambda x, w, v, b, r: x.astype(int) @ w.astype(int),
        [("dense", "dtypes int32, int32 -> int32: the kernel takes")],
    ),
    "optimization_barrier": (
        lambda x, w, v, b, r: jax.nn.relu(lax.optimization_barrier(x @ w)),
        [("dense", FUSED)],
    ),
}


@pytest.mark.parametrize("name", DENSE_MISSES)
def test_dense_near_miss(name):
    fn, expected = DENSE_MISSES[name]
    found = rows(fn, X, W, V, B, R)
    assert [pattern for pattern, _ in found] == [pattern for pattern, _ in expected]
    assert all(words in reason for (_, reason), (_, words) in zip(found, expected)), found


def test_no_row_for_what_is_no_layer():
    """A scalar product, an outer product, and einsum's elementwise products."""
    assert recognised(lambda x: jnp.vdot(x, x) + jnp.outer(x[0, 0], x[0, 0]).sum(), X) == []
    assert recognised(lambda x: jnp.einsum("btk,b->btk", x, x[:, 0, 0]), X) == []


def test_the_row_says_what_and_where():
    (site,) = jaxfuse.explain(lambda x, w, b: jax.nn.relu(x @ w + b), X, W, B).skipped
    assert (site.pattern, site.direction) == ("dense+bias+relu", "forward") and "too small" in site.reason
    assert site.shapes == (X.shape, W.shape) and site.dtypes == ("float32", "float32")
    assert "test_recognition.py:" in site.source


def linen_mlp():
    model = nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(16, dtype=jnp.bfloat16), nn.relu, nn.Dense(3)])
    return model.apply, model.init(jax.random.key(0), X)


def nnx_mlp():
    rngs = nnx.Rngs(0)
    graph, state = nnx.split(
        nnx.Sequential(
            nnx.Linear(8, 16, rngs=rngs),
            nnx.gelu,
            nnx.Linear(16, 16, rngs=rngs),
            nnx.relu,
            nnx.Linear(16, 3, rngs=rngs),
        )
    )
    return lambda state, x: nnx.merge(graph, state)(x), state


def haiku_mlp():
    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.Sequential([hk.Linear(16), jax.nn.gelu, hk.Linear(16), jax.nn.relu, hk.Linear(3)])(x))
    )
    return net.apply, net.init(jax.random.key(0), X)


def equinox_mlp():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [eqx.nn.Linear(8, 16, key=keys[0]), eqx.nn.Linear(16, 16, key=keys[1]), eqx.nn.Linear(16, 3, key=keys[2])]

    def apply(layers, x):
        def one(x):
            return layers[2](jax.nn.relu(layers[1](jax.nn.gelu(layers[0](x)))))

        return jax.vmap(jax.vmap(one))(x)

    return apply, layers


def keras_mlp():
    net = keras.Sequential(
        [
            keras.layers.Dense(16, activation=jax.nn.gelu),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(3),
        ]
    )
    net.build(X.shape)
    return (lambda weights, x: net.stateless_call(weights, [], x)[0]), [v.value for v in net.trainable_variables]


@pytest.mark.parametrize("make", [linen_mlp, nnx_mlp, haiku_mlp, equinox_mlp, keras_mlp], ids=lambda f: f.__name__)
def test_dense_layers_of_a_framework(make):
    apply, weights = make()
    assert recognised(apply, weights, X) == ["dense+bias+gelu_tanh", "dense+bias+relu", "dense+bias"]


@pytest.mark.parametrize("names", ["b, t", "n, s", "p, q", "i, j", "k, l", "m, h"])  # each has its place in a set
def test_symbolic_shapes_are_read(names):
    def fn(x):
        return jax.nn.relu((x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) @ W)

    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"{names}, 8"), jnp.float32)
    exported = jax.export.export(jax.jit(jaxfuse.fuse(fn, policy="always")))(spec)
    assert jnp.allclose(exported.call(X), fn(X), atol=1e-5)
    reasons = [reason for _, reason in rows(fn, spec)]
    assert not any("cannot be told" in reason for reason in reasons)
