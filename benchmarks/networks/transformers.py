"""Hugging Face's Flax models, from their configurations."""

import jax
import jax.numpy as jnp
from transformers import (
    BertConfig, FlaxBertForSequenceClassification, FlaxResNetForImageClassification, FlaxViTForImageClassification,
    ResNetConfig, ViTConfig)

from . import Network, cross_entropy, image


def resnet(small: bool) -> Network:
    sizes = dict(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10) if small else {}
    size = 32 if small else 224
    model = FlaxResNetForImageClassification(ResNetConfig(**sizes), (1, size, size, 3), _do_init=False)

    def init():
        variables = model.init_weights(jax.random.key(0), model.input_shape)
        return variables["params"], variables["batch_stats"]

    def apply(params, state, x):
        return model(x, {"params": params, "batch_stats": state}).logits

    def loss(params, state, x, labels):
        outputs, state = model(x, {"params": params, "batch_stats": state}, train=True)
        return cross_entropy(outputs.logits, labels), state["batch_stats"]

    return Network(init, apply, loss, image(4 if small else 8, size, channels_first=True))


def _stateless(model, x) -> Network:
    def init():
        return model.init_weights(jax.random.key(0), model.input_shape), ()

    def apply(params, state, x):
        return model(x, params=params).logits

    def loss(params, state, x, labels):
        outputs = model(x, params=params, train=True, dropout_rng=jax.random.key(0))
        return cross_entropy(outputs.logits, labels), state

    return Network(init, apply, loss, x)


_SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


def vit(small: bool) -> Network:
    size = 32 if small else 224
    config = ViTConfig(image_size=size, **(_SMALL | dict(patch_size=8) if small else {}))
    model = FlaxViTForImageClassification(config, (1, size, size, 3), _do_init=False)
    return _stateless(model, image(4 if small else 8, size, channels_first=True))


def bert(small: bool) -> Network:
    config = BertConfig(**(_SMALL | dict(vocab_size=100) if small else {}))
    shape = (4, 16) if small else (8, 128)
    model = FlaxBertForSequenceClassification(config, shape, _do_init=False)
    return _stateless(model, jax.ShapeDtypeStruct(shape, jnp.int32))
