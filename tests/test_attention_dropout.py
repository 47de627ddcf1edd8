"""Dropout on attention's softmax, in every framework's spelling, forward and with its gradients; and a factor that is learnt."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import pytest
from flax import nnx

from compare import jit, same
from frameworks import linen
from jaxfuse import ops
from layers import randn
from recognition import FUSED, fuse, rows, scalar
from spellings.attention import CAUSAL, mixed, scores

keras = pytest.importorskip("keras")
X, KEY, RATE = randn(2, 5, 8), jax.random.key(3), 0.3
DROPPED = dict(rngs=dict(dropout=KEY))


def halved(q, k):
    return scores(q, k, lambda s: s / 2)


def causal(broadcast):
    model = nn.MultiHeadDotProductAttention(2, dropout_rate=RATE, broadcast_dropout=broadcast, deterministic=False)
    return linen(model, X, mask=nn.make_causal_mask(X[..., 0]), **DROPPED)


class Layer(nn.Module):
    """With the softmax dropped by `nn.Dropout`, as Hugging Face's models have it."""

    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.DenseGeneral((2, 4))(x) for _ in range(3))
        p = nn.Dropout(RATE, deterministic=False)(halved(q, k))
        return nn.DenseGeneral(8, axis=(-2, -1))(mixed(p, v))


def nnx_layer():
    layer = nnx.MultiHeadAttention(2, 8, dropout_rate=RATE, deterministic=False, decode=False, rngs=nnx.Rngs(0))
    graph, weights, others = nnx.split(layer, nnx.Param, ...)
    return lambda weights, x: nnx.merge(graph, weights, others)(x, rngs=nnx.Rngs(3)), weights


def haiku():
    def layer(x):
        q, k, v = (hk.Linear(8)(x).reshape(2, 5, 2, 4) for _ in range(3))
        p = hk.dropout(hk.next_rng_key(), RATE, halved(q, k))
        return hk.Linear(8)(mixed(p, v).reshape(2, 5, 8))

    net = hk.transform(layer)
    return lambda weights, x: net.apply(weights, KEY, x), net.init(jax.random.key(0), X)


def equinox():
    arrays, rest = eqx.partition(eqx.nn.MultiheadAttention(2, 8, dropout_p=RATE, key=jax.random.key(0)), eqx.is_array)

    def apply(arrays, x):
        return jax.vmap(lambda x, key: eqx.combine(arrays, rest)(x, x, x, CAUSAL, key=key))(x, jax.random.split(KEY, 2))

    return apply, arrays


def keras_layer():
    layer = keras.layers.MultiHeadAttention(2, 4, dropout=RATE)
    layer.build(X.shape, X.shape)
    state = [v.value for v in layer.non_trainable_variables]
    return (lambda w, x: layer.stateless_call(w, state, x, x, training=True)[0]), [v.value for v in layer.trainable_variables]


LAYERS = {
    "attention+mask+dropout, linen": lambda: causal(False),
    "attention+mask+dropout, linen, one mask for all": lambda: causal(True),
    "attention+dropout, linen's Dropout": lambda: linen(Layer(), X, **DROPPED),
    "attention+dropout, nnx": nnx_layer,
    "attention+dropout, haiku": haiku,
    "attention+mask+dropout, equinox": equinox,
    "attention+dropout, keras": keras_layer,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_of_a_framework(name):
    kind, (apply, weights) = name.split(",")[0], LAYERS[name]()
    step = jax.grad(scalar(apply), (0, 1))
    assert [row for row in rows(apply, weights, X) if "attention" in row[0]] == [(kind, FUSED)]
    assert [row for row in rows(step, weights, X) if "attention" in row[0]] == [(kind, FUSED), (f"backward {kind}", FUSED)]
    known = jit(step)(weights, X)
    for made in (fuse(step), jax.grad(scalar(fuse(apply)), (0, 1))):
        same(jit(made)(weights, X), known, times=5, floor=0.1)  # the gradient of the keys' bias is 0


def test_a_factor_that_is_learnt():
    """Its gradient is JAX's own: no kernel has it, and none claims the attention of a program that computes it."""
    q, k, v, factor = *(randn(2, 5, 2, 4, seed=i) for i in range(3)), randn(2, 5, 5)

    def plain(q, k, v, factor):
        return mixed(halved(q, k) * factor, v)

    step, args = jax.grad(scalar(plain), (0, 1, 2, 3)), (q, k, v, factor)
    wanted = jit(step)(*args)
    for function in (lambda q, k, v, factor: ops.attention(q, k, v, factor=factor), fuse(plain)):
        same(jit(jax.grad(scalar(function), (0, 1, 2, 3)))(*args), wanted, times=5)
    assert "is read by" in dict(rows(step, *args))["attention"]
    same(jit(fuse(step))(*args), wanted, times=5)
