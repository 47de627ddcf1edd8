"""What whole train steps are made of beside convolutions: gradients of dense layers and activations, optimizer updates; and
transformers as Hugging Face writes them, where every layer has its row."""

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from layers import conv, randn
from recognition import FUSED, NO_KERNEL, XLA_DOES_THIS, correct, differentiated, recognised, rows, scalar

IMAGES = randn(2, 6, 6, 4), randn(3, 3, 4, 4), randn(4)
X, W, V, B = randn(2, 5, 8), randn(8, 16), randn(8, 16, seed=1), randn(16)
ACTIVATIONS = {name: getattr(jnp, name, None) or getattr(jax.nn, name) for name in (
    "relu", "relu6", "leaky_relu", "elu", "silu", "gelu", "hard_swish", "softplus", "tanh", "sigmoid")}
each_activation = pytest.mark.parametrize("name, function", [
    ({"gelu": "gelu_tanh"}.get(name, name), function) for name, function in ACTIVATIONS.items()], ids=ACTIVATIONS)


def gradients(fn, *args):
    return sorted(recognised(jax.grad(scalar(fn), tuple(range(len(args)))), *args))


# --- gradients ---------------------------------------------------------------------------------------------------


@each_activation
def test_dense_layer_with_an_activation(name, function):
    def layer(x, w, b):
        return function(x @ w + b)

    assert recognised(layer, X, W, B) == [f"dense+bias+{name}"]
    assert gradients(layer, X, W, B) == [f"backward {name}_grad+dense_grad+bias_grad", f"dense+bias+{name}"]


@each_activation
def test_convolution_with_an_activation(name, function):
    """Both directions are one op each, though the derivative reads the activation's argument."""
    assert gradients(lambda x, w, b: function(conv(x, w) + b), *IMAGES) == [f"backward conv+bias+{name}", f"conv+bias+{name}"]


PRECISE = dict(precision="TF32_TF32_F32")
# (the program, its arguments, its rows, the reason that each row gives)
REFUSED = {
    "dense": (lambda x, w, b: jax.nn.relu(jnp.matmul(x, w, **PRECISE) + b), (X, W, B),
              ["dense+bias+relu", "backward relu_grad+dense_grad+bias_grad"], "precision"),
    "matmul": (lambda x: jnp.einsum("btk,bsk->bts", x, x, **PRECISE), (X,), ["matmul", "backward matmul_grad"], "precision"),
    "convolution": (
        lambda x, w, b: jax.nn.relu(lax.conv_general_dilated(
            x, w, (1, 1), ((-1, 1), (0, 0)), dimension_numbers=("NHWC", "HWIO", "NHWC")) + b), IMAGES,
        ["conv+bias+relu", "backward conv+bias"], "negative padding"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_gradient_that_no_kernel_takes_is_one_row(name):
    fn, args, expected, why = REFUSED[name]
    found = [row for row in rows(jax.grad(scalar(fn), tuple(range(len(args)))), *args) if row[1] != FUSED]
    assert [pattern for pattern, _ in found] == expected and all(why in reason for _, reason in found)


CHAINS = {
    "residual": (lambda x, w, b: jax.nn.silu(conv(x, w) + b + x), ["backward conv+bias+add+silu", "conv+bias+add+silu"]),
    "residual last": (lambda x, w, b: x + jax.nn.silu(conv(x, w) + b), ["backward conv+bias+silu", "conv+bias+silu+add"]),
    "argument read": (lambda x, w, b: (lambda z: jax.nn.silu(z) + jnp.cos(z))(conv(x, w) + b), ["backward conv+bias", "conv+bias"]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_convolution_with_silu(name):
    fn, expected = CHAINS[name]
    step = jax.value_and_grad(scalar(fn), (0, 1, 2))
    assert sorted(pattern for pattern, reason in rows(step, *IMAGES) if reason == FUSED) == expected
    correct(step, *IMAGES)


GRADIENTS = {  # beside those of spellings.dense
    "weight first": (lambda x, w, v, b: jax.vmap(jax.vmap(lambda x: w.T @ x + b))(x), ["backward dense_grad", "dense+bias"]),
    "three of one input": (
        lambda x, w, v, b: (x @ w + b, x @ v + b, jnp.cos(x @ (w * v))),
        ["backward dense_grad"] + ["backward dense_grad+bias_grad"] * 2 + ["dense"] + ["dense+bias"] * 2),
    "batched": (lambda x, w, v, b: jnp.einsum("btk,bsk->bts", x, x), ["backward matmul_grad", "matmul"]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(name):
    fn, expected = GRADIENTS[name]
    assert gradients(fn, X, W, V, B) == expected


def test_frozen_weights_have_half_a_gradient():
    assert sorted(recognised(jax.grad(scalar(lambda x: jax.nn.relu(x @ W + B))), X)) == ["backward relu_grad+dense_grad", "dense+bias+relu"]


def test_gradient_near_misses():
    """The slope of another function than the layer's activation is no activation gradient; a sum over features no bias's."""

    @jax.custom_vjp
    def silu(z):
        return jax.nn.silu(z)

    silu.defvjp(lambda z: (silu(z), z), lambda z, g: (g * jax.nn.sigmoid(z),))
    assert not any("silu_grad" in row for row in gradients(lambda x, w, b: silu(x @ w + b), X, W, B))
    over_features = rows(jax.grad(scalar(lambda w, b: X @ w + b), (0, 1)), W, X[..., :1])
    assert ("backward dense_grad", FUSED) in over_features


def test_a_forward_pass_alone_has_no_backward_rows():
    assert not any("backward" in row for row in recognised(lambda x, w: x @ jnp.transpose(w.T), X, W))
    jvp = recognised(lambda x, w: jax.jvp(lambda x: x @ w, (x,), (x,)), X, W)
    assert jvp == ["dense"] or jvp == ["dense", "dense"]


@pytest.mark.parametrize("wrap", ["scan", "checkpoint"])
def test_layers_in_loops_and_rematerialised(wrap):
    """The forward body, what the backward pass computes again, and the gradients: told apart in bodies too."""

    def layer(x):
        return jnp.tanh(x @ W[:, :8] + B[:8])

    loop = lambda x: lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]
    fn = loop if wrap == "scan" else jax.checkpoint(layer)
    found = recognised(jax.grad(scalar(fn)), X)
    forward = [row for row in found if not row.startswith("backward")]
    assert forward == ["dense+bias+tanh"] + ["dense"] * (wrap == "checkpoint")
    assert sum("dense_grad" in row for row in found) == 1


def test_a_loop_of_residual_blocks():
    """What the forward body gives its backward loop is relu's mask, which is that of relu's value too."""
    def block(x, layer):
        w, b = layer
        return x + conv(jax.nn.relu(conv(x, w) + b), w), None

    args = randn(2, 6, 6, 8), randn(2, 3, 3, 8, 8) / 8, randn(2, 8)
    step = differentiated(lambda x, w, b: lax.scan(block, x, (w, b))[0], *args)
    found = [pattern.replace("maximum0", "relu") for pattern, reason in rows(step, *args) if reason == FUSED]  # jax 0.10's relu in a loop
    assert found == ["conv+bias+relu", "backward conv+bias+relu", "conv+add", "backward conv"]
    correct(step, *args)


# --- optimizers --------------------------------------------------------------------------------------------------

PARAMS = {"w": randn(8, 16), "b": randn(16), "v": randn(16, 3)}


def network_loss(params, x):
    return jnp.sum(jnp.sin(jax.nn.relu(x @ params["w"] + params["b"]) @ params["v"]))


def l2_loss(params, x):
    return network_loss(params, x) + 1e-3 * sum(jnp.sum(p * p) for p in jax.tree.leaves(params))


def train_step(transformation, loss=network_loss):
    def step(params, state, x):
        gradient = jax.grad(loss)(params, x)
        updates, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return step


def updates(step, transformation, *batch):
    found = recognised(step, PARAMS, transformation.init(PARAMS), *batch)
    return [row for row in found if not row.startswith(("dense", "backward"))]


OPTIMIZERS = {
    "sgd x3": optax.sgd(0.1),
    "sgd x3, of a schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 10)),
    "momentum x3": optax.sgd(0.1, 0.9),
    "momentum x3, Nesterov": optax.sgd(0.1, 0.9, nesterov=True),
    "momentum+weight_decay x3": optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, 0.9)),
    "adam x3": optax.adam(1e-3),
    "adam x3, of clipped gradients": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "adam+weight_decay x3": optax.chain(optax.add_decayed_weights(1e-4), optax.adam(1e-3)),
    "adamw x3": optax.adamw(1e-3),
    "adamw x3, of a schedule": optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    """One row for each kind of update, whatever the number of tensors; an L2 loss is part of the gradient."""
    expected = [name.split(",")[0]]
    assert updates(train_step(OPTIMIZERS[name]), OPTIMIZERS[name], X) == expected
    assert updates(train_step(OPTIMIZERS[name], l2_loss), OPTIMIZERS[name], X) == expected


@pytest.mark.parametrize("name", ["momentum x3", "adam x3", "adamw x3"])
def test_optimizer_alone_in_a_loop_and_with_microbatches(name):
    transformation = OPTIMIZERS[name]
    step = train_step(transformation)

    def alone(params, state, gradient):
        changes, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, changes), state

    def steps(params, state, xs):
        return lax.scan(lambda carry, x: (step(*carry, x), None), (params, state), xs)[0]

    def microbatches(params, state, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(network_loss)(params, x)), None

        return alone(params, state, lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)[0])

    assert updates(alone, transformation, PARAMS) == [name]
    assert updates(steps, transformation, X[None]) == [name]
    assert updates(microbatches, transformation, X[None]) == [name]


def test_masked_weight_decay_has_two_rows():
    transformation = optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    assert sorted(updates(train_step(transformation), transformation, X)) == ["adam x1", "adamw x2"]


@pytest.mark.parametrize("make", [optax.rmsprop, optax.lion, optax.lamb, optax.adagrad, optax.amsgrad], ids=lambda f: f.__name__)
def test_other_optimizers_are_not_mistaken(make):
    transformation = make(1e-3)
    assert updates(train_step(transformation), transformation, X) == []


def test_what_only_looks_like_an_update():
    assert rows(lambda p, q: (p + 0.1 * q, p - jnp.sin(q)), X, X) == []
    assert rows(lambda mean, x: 0.9 * mean + 0.1 * x, X, X) == []


# --- whole networks ----------------------------------------------------------------------------------------------


@functools.cache
def hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    if kind == "bert":
        model = transformers.FlaxBertModel(transformers.BertConfig(**sizes, vocab_size=50, max_position_embeddings=16))
        x = jnp.ones((2, 8), jnp.int32)
    else:
        model = transformers.FlaxViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
        x = jnp.ones((2, 3, 32, 32))

    def fn(params, x):
        outputs = model(x, params=params)
        return outputs.last_hidden_state, outputs.pooler_output

    return fn, model.params, x


# layers of one block: query, key, value; attention; output; two norms; two dense layers
OF_BOTH = {"dense+bias": 6, "dense+bias+add": 4, "dense+bias+gelu": 2, "dense+bias+tanh": 1}
EXPECTED = {
    "bert": OF_BOTH | {"attention+bias": 2, "layer_norm": 4, "add+layer_norm": 1},  # the embeddings are added up
    "vit": OF_BOTH | {"attention": 2, "layer_norm": 5},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_layer_of_a_transformer_has_one_row(kind):
    fn, params, x = hugging_face(kind)
    forward = [(pattern, reason) for pattern, reason in rows(fn, params, x) if "conv" not in pattern]
    assert collections.Counter(pattern for pattern, _ in forward) == EXPECTED[kind] and {reason for _, reason in forward} == {FUSED}


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_layer_of_a_transformers_train_step_has_one_row_each_way(kind):
    fn, params, x = hugging_face(kind)
    transformation = optax.adamw(1e-3)

    def step(params, state, x):
        loss, gradient = jax.value_and_grad(scalar(fn))(params, x)
        updates, state = transformation.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    found = [(pattern, reason) for pattern, reason in rows(step, params, transformation.init(params), x) if "conv" not in pattern]
    forward = collections.Counter(p for p, _ in found if not p.startswith(("backward", "adamw")))
    backward = [p for p, _ in found if p.startswith("backward")]
    assert forward == EXPECTED[kind] and all(reason in (FUSED, XLA_DOES_THIS) or reason.endswith(NO_KERNEL) for _, reason in found)
    assert all("norm" in p or p.startswith("adamw") for p, reason in found if reason != FUSED)
    assert sum("dense_grad" in p for p in backward) == 13  # 6 for each block and the pooler
    assert sum(p.startswith("backward attention") for p in backward) == 2
    assert {p for p in backward if "_grad" in p} == {f"backward {p}dense_grad+bias_grad" for p in ("", "gelu_grad+", "tanh_grad+")}
    updates = [row for row in found if row[0].startswith("adamw")]
    assert updates == [(f"adamw x{len(jax.tree.leaves(params))}", XLA_DOES_THIS)]


def test_dropout_and_comparisons_are_left_to_xla():
    """One kernel each as compiled, so that a row would only be noise (docs/fusions.md)."""

    def kernels(fn, *args):
        entry = jax.jit(fn).lower(*args).compile().as_text().split("ENTRY")[1]
        return entry.count("fusion("), entry.count("f32[2,5,8]") - len([a for a in args if a.dtype == jnp.float32])

    def dropped(mask, x):
        return jnp.where(mask, x / 0.9, 0)

    assert kernels(lambda x, y: (x > 0).astype(x.dtype) * y, X, X)[0] == 1
    assert kernels(dropped, X > 0, X)[0] == 1
    assert kernels(jax.grad(lambda x, mask: jnp.sum(jnp.sin(dropped(mask, x)))), X, X > 0)[0] == 1
    assert recognised(lambda key, x: nn.Dropout(0.1, deterministic=False).apply({}, x, rngs={"dropout": key}), jax.random.key(0), X) == []
