"""Networks of other people, unmodified from their packages, with random weights; small ones for tests.

`NETWORKS` maps a name to `build(small) -> Network`. A framework is imported when one of its networks is built.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Network(NamedTuple):
    """A network with the same four functions, whatever package it is from.

    init() -> (params, state): trained parameters, and what else it keeps (running statistics, ...);
    apply(params, state, x) -> logits or features, in inference;
    loss(params, state, x, labels) -> (number, new state), in training;
    x: shape and dtype of the input; labels are int32 `[batch]`.
    """

    init: Callable[[], tuple[Any, Any]]
    apply: Callable
    loss: Callable
    x: jax.ShapeDtypeStruct

    @property
    def labels(self):
        return jax.ShapeDtypeStruct(self.x.shape[:1], jnp.int32)


def cross_entropy(logits, labels):
    logits = logits.reshape(logits.shape[0], -1).astype(jnp.promote_types(logits.dtype, jnp.float32))
    return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, logits.shape[1]) * jax.nn.log_softmax(logits), -1))


def image(batch, size, channels_first=False, dtype=jnp.float32):
    """Shape of a batch of RGB images."""
    shape = (batch, 3, size, size) if channels_first else (batch, size, size, 3)
    return jax.ShapeDtypeStruct(shape, dtype)


def _lazily(module: str, function: str, *args):
    def build(small: bool) -> Network:
        return getattr(importlib.import_module(f"{__name__}.{module}"), function)(small, *args)

    return build


NETWORKS: dict[str, Callable[[bool], Network]] = {
    "keras ResNet50": _lazily("keras", "application", "ResNet50"),
    "keras MobileNet": _lazily("keras", "application", "MobileNet"),
    "keras VGG16": _lazily("keras", "application", "VGG16"),
    "keras InceptionV3": _lazily("keras", "application", "InceptionV3"),
    "haiku ResNet18": _lazily("haiku", "resnet18"),
    "haiku MobileNetV1": _lazily("haiku", "mobilenet_v1"),
    "flax linen ResNet50": _lazily("flax_linen", "resnet50", "float32"),
    "flax linen ResNet50 bf16": _lazily("flax_linen", "resnet50", "bfloat16"),
    "flax nnx ResNet50": _lazily("flax_nnx", "resnet50"),
    "flax nnx U-Net": _lazily("flax_unet", "unet"),
    "flax linen MLP-Mixer": _lazily("flax_mixer", "mixer"),
    "equinox CNN, ema": _lazily("equinox", "cnn", "ema"),
    "equinox CNN, batch": _lazily("equinox", "cnn", "batch"),
    "transformers ResNet": _lazily("transformers", "resnet"),
    "transformers ViT": _lazily("transformers", "vit"),
    "transformers BERT": _lazily("transformers", "bert"),
}
