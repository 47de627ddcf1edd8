"""Keras applications on the JAX backend, through `stateless_call`."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax.numpy as jnp
import keras

from . import Network, cross_entropy, image

SMALL = {
    "ResNet50": dict(input_shape=(32, 32, 3)),
    "MobileNet": dict(input_shape=(32, 32, 3), alpha=0.25, dropout=0.0),
    "VGG16": dict(input_shape=(32, 32, 3), include_top=False, pooling="avg"),
    "InceptionV3": dict(input_shape=(75, 75, 3)),
}


def application(small: bool, name: str) -> Network:
    options = dict(SMALL[name]) if small else {}
    if options.get("include_top", True):
        options |= dict(classes=10) if small else {}
    model = getattr(keras.applications, name)(weights=None, classifier_activation=None, **options)

    def init():
        return tuple([jnp.asarray(v.value) for v in variables]
                     for variables in (model.trainable_variables, model.non_trainable_variables))

    def apply(params, state, x):
        return model.stateless_call(params, state, x, training=False)[0]

    def loss(params, state, x, labels):
        logits, state = model.stateless_call(params, state, x, training=True)
        return cross_entropy(logits, labels), state

    return Network(init, apply, loss, image(8, model.input_shape[1] or 224))
