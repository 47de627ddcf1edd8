"""Keras on the JAX backend: `fit` as ever, with the model's train step fused by overriding one method."""

import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from common import arguments, closing, console, digits
from keras import layers

import jaxfuse

jaxfuse.retain_memory()  # before the first computation


class FusedModel(keras.Model):
    """A functional model whose train step is fused."""

    def train_step(self, state, data):
        return jaxfuse.fuse(super().train_step)(state, data)


class Watch(keras.callbacks.Callback):
    """Losses and times of the steps; `site` what was fused."""

    def __init__(self, title: str, steps: int):
        super().__init__()
        self.title, self.steps, self.losses, self.seconds = title, steps, [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        self.seconds.append(time.perf_counter() - self.began)
        if len(self.losses) % max(1, self.steps // 5) == 0:
            console.print(f"{self.title:>9}  step {len(self.losses):4d} of {self.steps}  mean loss {self.losses[-1]:.4f}")


def network(model: type) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = layers.Input((16, 16, 1))
    for features, strides in ((32, 1), (32, 2), (64, 2)):
        x = layers.Conv2D(features, 3, strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    built = model(inputs, outputs)
    built.compile(optimizer=keras.optimizers.Adam(2e-3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return built


def sites(model: keras.Model, images):
    """What is fused in the network in training."""
    variables = [[v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables)]
    return jaxfuse.explain(lambda *args: model.stateless_call(*args, training=True)[0], *variables, images).fused


def main():
    given, (images, labels) = arguments(__doc__), digits()
    count = 64 * given.steps
    images, labels = np.resize(images, (count, 16, 16, 1)), np.resize(labels, count)
    runs = {}
    for name, model in (("unfused", keras.Model), ("fused", FusedModel)):
        built, watch = network(model), Watch(name, given.steps)
        built.fit(images, labels, batch_size=64, shuffle=False, verbose=0, callbacks=[watch])
        runs[name] = watch.losses, 1e3 * float(np.median(watch.seconds[1:]))
    closing(sites(built, images[:64]), runs)


if __name__ == "__main__":
    main()
