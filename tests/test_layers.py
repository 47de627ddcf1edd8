"""Convolution, batch norm and activation as layers of each framework, in inference and in training."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import pytest
from flax import nnx

from frameworks import equinox, haiku, linen, nnx_module
from recognition import patterns

X, FIRST = jnp.ones((4, 8, 8, 16)), jnp.ones((4, 16, 8, 8))
LINE, CUBE = X[:, 0], X[:, None]
L = keras.layers


def by_keras(layers, x=X):
    def found(training):
        model = keras.Sequential([L.Input(x.shape[1:]), *layers()])
        variables = [[v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables)]
        return patterns(lambda *args: model.stateless_call(*args, training=training), *variables, x)

    return found


def by_flax(x=X, mask=None, replicas=False, **options):
    """`replicas`: under vmap, with the statistics of all by `axis_name`."""
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train, **call):
            x = nn.Conv(16, (3, 3), dtype=options.get("dtype"))(x)
            norm = nn.BatchNorm(use_running_average=not train, axis_name="replica" if replicas else None, **options)
            return nn.relu(norm(x, **call))

    def found(training):
        variables = jax.eval_shape(lambda x: Block().init(jax.random.key(0), x, False), x)
        call = {} if mask is None else dict(mask=mask)
        apply = lambda v, x: Block().apply(v, x, training, mutable=["batch_stats"], **call)
        if not replicas:
            return patterns(apply, variables, x)
        return patterns(jax.vmap(apply, (None, 0), axis_name="replica"), variables, x.reshape(2, 2, 8, 8, 16))

    return found


def by_nnx(x=X):
    def found(training):
        model = nnx.Sequential(nnx.Conv(16, 16, (3, 3), rngs=nnx.Rngs(0)), nnx.BatchNorm(16, rngs=nnx.Rngs(0)), nnx.relu)
        model.set_attributes(use_running_average=not training, raise_if_not_found=False)
        graph, state = nnx.split(model)

        def run(state, x):
            merged = nnx.merge(graph, state)
            return merged(x), nnx.state(merged)

        return patterns(run, state, x)

    return found


def by_haiku(x=X, replicas=False, conv=None, **norm):
    def network(axis):
        def net(x, training):
            batch_norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis, **norm)
            return jax.nn.relu(batch_norm(hk.Conv2D(16, 3, **(conv or {}))(x), training))

        return hk.without_apply_rng(hk.transform_with_state(net))

    def found(training):
        variables = jax.eval_shape(lambda x: network(None).init(jax.random.key(0), x, True), x)
        if not replicas:
            return patterns(lambda *args: network(None).apply(*args, training), *variables, x)
        each = jax.vmap(lambda *args: network("replica").apply(*args, training), (None, None, 0), axis_name="replica")
        return patterns(each, *variables, x.reshape(2, 2, 8, 8, 16))

    return found


def by_equinox(mode):
    def found(training):
        conv = eqx.nn.Conv2d(16, 16, 3, padding=1, key=jax.random.key(0))
        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(16, "batch", mode=mode)
        norm = eqx.nn.inference_mode(norm, not training)

        def run(x):
            y, new = jax.vmap(lambda x: norm(conv(x), state), axis_name="batch", out_axes=(0, None))(x)
            return jax.nn.relu(y), jax.tree.leaves(new)

        return patterns(run, FIRST)

    return found


BLOCK = ["conv+bn+relu"], ["conv+bias", "bn+relu"]
# name -> (how, fused in inference, fused in training)
LAYERS = {
    "keras": (by_keras(lambda: [L.Conv2D(16, 3), L.BatchNormalization(), L.ReLU()]), *BLOCK),
    "keras, channels first": (by_keras(lambda: [
        L.Conv2D(16, 3, data_format="channels_first"), L.BatchNormalization(axis=1), L.ReLU()], FIRST), *BLOCK),
    "keras, no scale and center": (by_keras(lambda: [
        L.Conv2D(16, 3), L.BatchNormalization(scale=False, center=False), L.Activation("relu")]), *BLOCK),
    "keras, mixed precision": (by_keras(lambda: [
        layer(dtype="mixed_bfloat16", **options) for layer, options in
        ((L.Conv2D, dict(filters=16, kernel_size=3)), (L.BatchNormalization, {}), (L.ReLU, {}))]), *BLOCK),
    "keras, separable": (by_keras(lambda: [L.SeparableConv2D(16, 3), L.BatchNormalization(), L.ReLU()]),
                         ["conv", "conv+bn+relu"], ["conv", "conv+bias", "bn+relu"]),
    "keras, depthwise and dilated": (by_keras(lambda: [
        L.DepthwiseConv2D(3, dilation_rate=2), L.BatchNormalization(), L.ReLU(6.0)]),
        ["conv+bn+relu6"], ["conv+bias", "bn+relu6"]),
    "keras, transposed": (by_keras(lambda: [L.Conv2DTranspose(16, 3, strides=2), L.BatchNormalization(), L.ReLU()]), *BLOCK),
    "keras, one dimension, causal": (by_keras(lambda: [
        L.Conv1D(16, 3, padding="causal", dilation_rate=2, activation="swish")], LINE), *2 * (["pad+conv+bias+silu"],)),
    "keras, three dimensions": (by_keras(lambda: [L.Conv3D(16, 3, padding="same"), L.BatchNormalization(), L.ReLU()], CUBE), *BLOCK),
    "flax": (by_flax(), *BLOCK),
    "flax, E[(x-m)²]": (by_flax(use_fast_variance=False), *BLOCK),
    "flax, no scale": (by_flax(use_scale=False), *BLOCK),
    "flax, neither": (by_flax(use_scale=False, use_bias=False), *BLOCK),
    "flax, bfloat16": (by_flax(X.astype(jnp.bfloat16), dtype=jnp.bfloat16), *BLOCK),
    "flax, bfloat16 statistics": (by_flax(dtype=jnp.bfloat16, force_float32_reductions=False), *BLOCK),
    "flax, replicas": (by_flax(replicas=True), *BLOCK),
    "nnx": (by_nnx(), *BLOCK),
    "haiku": (by_haiku(), *BLOCK),
    "haiku, channels first": (by_haiku(FIRST, conv=dict(data_format="NCHW"), data_format="NC..."), *BLOCK),
    "haiku, bfloat16": (by_haiku(X.astype(jnp.bfloat16)), *BLOCK),
    "haiku, replicas": (by_haiku(replicas=True), *BLOCK),
    "equinox, ema": (by_equinox("ema"), *BLOCK),
    "equinox, batch": (by_equinox("batch"), *BLOCK),
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, training):
    found, *expected = LAYERS[name]
    assert found(training) == (expected[training], [])


def keras_transposed(data_format="channels_last", x=X, layer=L.Conv2DTranspose, **options):
    return lambda: by_keras(lambda: [layer(16, 4, strides=2, activation="relu", data_format=data_format, **options)], x)(False)


def transposed(make, x=X):
    """Of a layer as `make` gives it: (apply, weights) of it and x."""
    def found():
        apply, weights = make()
        return patterns(lambda weights, x: jax.nn.relu(apply(weights, x)), weights, x)

    return found


def flax_transposed(**options):
    return transposed(lambda: linen(nn.ConvTranspose(16, (4, 4), strides=(2, 2), **options), X))


def haiku_transposed(x=X, **options):
    return transposed(lambda: haiku(lambda: hk.Conv2DTranspose(16, 4, stride=2, **options), x), x)


def equinox_transposed(**options):
    key = jax.random.key(0)
    return transposed(lambda: equinox(eqx.nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1, key=key, **options), 1), FIRST)


TRANSPOSED = {
    "keras": keras_transposed(),
    "keras, same": keras_transposed(padding="same"),
    "keras, stride beyond the filter": lambda: by_keras(lambda: [L.Conv2DTranspose(16, 2, strides=3, activation="relu")])(False),
    "keras, channels first": keras_transposed("channels_first", FIRST),
    "keras, one dimension": keras_transposed(x=LINE, layer=L.Conv1DTranspose),
    "keras, three dimensions": keras_transposed(x=CUBE, layer=L.Conv3DTranspose),
    "flax": flax_transposed(),
    "flax, valid": flax_transposed(padding="VALID"),
    "flax, transpose_kernel": flax_transposed(transpose_kernel=True),
    "nnx": transposed(lambda: nnx_module(lambda rngs: nnx.ConvTranspose(16, 16, (4, 4), strides=(2, 2), rngs=rngs))),
    "haiku": haiku_transposed(),
    "haiku, channels first": haiku_transposed(FIRST, data_format="NCHW"),
    "equinox": equinox_transposed(),
    "equinox, groups": equinox_transposed(groups=2, output_padding=1),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution(name):
    assert TRANSPOSED[name]() == (["conv+bias+relu"], [])


# name -> (how, fused, skipped pattern, words of the reason), in training
LEFT = {
    "flax, masked": (by_flax(mask=jnp.ones((4, 8, 8, 1), bool)), ["conv+bias"], "bn", "leaves elements out of the statistics"),
    "flax, over a spatial axis": (by_flax(axis=1), ["bn+relu", "conv+bias"], None, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_layer_that_is_not_all_fused(name):
    found, fused, pattern, words = LEFT[name]
    got, skipped = found(True)
    assert sorted(got) == fused and [p for p, _ in skipped] == [pattern] * (pattern is not None)
    assert all(words in reason for _, reason in skipped)
