"""Networks and a train step as a Flax user writes them: nothing here knows of jaxfuse."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from .cases import EFFICIENTNET_B0, MOBILENET_V2
from .transformers_flax import BertBase, ViTS16


class Bottleneck(nn.Module):
    features: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), (self.strides, self.strides))(y)))
        y = norm()(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="norm_proj")(conv(4 * self.features, (1, 1), (self.strides, self.strides), name="conv_proj")(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)
        x = nn.relu(x)
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Bottleneck(64 * 2**stage, 2 if stage > 0 and block == 0 else 1, self.dtype)(x, train)
        x = x.mean(axis=(1, 2))
        return nn.Dense(1000, dtype=self.dtype)(x)


class InvertedResidual(nn.Module):
    features: int
    expansion: int
    strides: int
    dtype: Any

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        hidden = self.expansion * x.shape[-1]
        y = x
        if self.expansion > 1:
            y = nn.relu6(norm()(conv(hidden, (1, 1))(y)))
        y = nn.relu6(norm()(conv(hidden, (3, 3), (self.strides, self.strides), feature_group_count=hidden)(y)))
        y = norm()(conv(self.features, (1, 1))(y))
        return x + y if x.shape == y.shape else y


class MobileNetV2(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=False):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = nn.relu6(norm()(conv(32, (3, 3), (2, 2))(x)))
        for expansion, features, blocks, strides in MOBILENET_V2:
            for block in range(blocks):
                x = InvertedResidual(features, expansion, strides if block == 0 else 1, self.dtype)(x, train)
        x = nn.relu6(norm()(conv(1280, (1, 1))(x)))
        x = x.mean(axis=(1, 2))
        return nn.Dense(1000, dtype=self.dtype)(x)


class MBConv(nn.Module):
    """An inverted residual with swish, whose channels are weighted by what squeeze-and-excitation makes of their means."""

    features: int
    expansion: int
    strides: int
    size: int
    dtype: Any

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        hidden = self.expansion * x.shape[-1]
        y = x
        if self.expansion > 1:
            y = nn.swish(norm()(conv(hidden, (1, 1))(y)))
        depthwise = conv(hidden, (self.size, self.size), (self.strides, self.strides), feature_group_count=hidden)
        y = nn.swish(norm()(depthwise(y)))
        mean = y.mean(axis=(1, 2), keepdims=True)
        squeezed = nn.swish(nn.Conv(x.shape[-1] // 4, (1, 1), dtype=self.dtype)(mean))
        y = y * nn.sigmoid(nn.Conv(hidden, (1, 1), dtype=self.dtype)(squeezed))
        y = norm()(conv(self.features, (1, 1))(y))
        return x + y if x.shape == y.shape else y


class EfficientNetB0(nn.Module):
    """Tan and Le 2019."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=False):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = nn.swish(norm()(conv(32, (3, 3), (2, 2))(x)))
        for expansion, features, blocks, strides, size in EFFICIENTNET_B0:
            for block in range(blocks):
                x = MBConv(features, expansion, strides if block == 0 else 1, size, self.dtype)(x, train)
        x = nn.swish(norm()(conv(1280, (1, 1))(x)))
        x = x.mean(axis=(1, 2))
        return nn.Dense(1000, dtype=self.dtype)(x)


class ConvNeXtTiny(nn.Module):
    """Liu et al. 2022: depthwise 7×7, layer norm, and two dense layers with gelu in every block."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=False):
        del train  # nothing in it differs
        norm = partial(nn.LayerNorm, epsilon=1e-6, dtype=self.dtype)
        for stage, (features, blocks) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
            size = 2 if stage else 4
            x = norm()(x) if stage else x
            x = nn.Conv(features, (size, size), (size, size), dtype=self.dtype)(x)
            x = x if stage else norm()(x)
            for block in range(blocks):
                y = norm()(nn.Conv(features, (7, 7), feature_group_count=features, dtype=self.dtype)(x))
                y = nn.gelu(nn.Dense(4 * features, dtype=self.dtype)(y), approximate=False)
                scale = self.param(f"scale_{stage}_{block}", nn.initializers.constant(1e-6), (features,))
                x = x + jnp.asarray(scale, self.dtype) * nn.Dense(features, dtype=self.dtype)(y)
        return nn.Dense(1000, dtype=self.dtype)(norm()(x.mean(axis=(1, 2))))


NETWORKS = {
    "resnet50": ResNet50,
    "mobilenet_v2": MobileNetV2,
    "efficientnet_b0": EfficientNetB0,
    "convnext_tiny": ConvNeXtTiny,
    "vit_s16": ViTS16,
    "bert_base": BertBase,
}


class TrainState(NamedTuple):
    params: Any
    batch_stats: Any
    momentum: Any


def make_train_step(model, fuse, learning_rate=1e-3):
    """train_step(state, images, labels) -> (state, loss): softmax cross entropy, SGD with momentum 0.9; the loss is fuse(loss)."""

    def loss_fn(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, images, train=True, mutable=["batch_stats"])
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        loss = -jnp.mean(jnp.sum(jax.nn.one_hot(labels, 1000) * jax.nn.log_softmax(logits), axis=-1))
        return loss, updates.get("batch_stats", {})

    def train_step(state, images, labels):
        grad_fn = jax.value_and_grad(fuse(loss_fn), has_aux=True)
        (loss, batch_stats), grads = grad_fn(state.params, state.batch_stats, images, labels)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
        params = jax.tree.map(lambda p, m: p - learning_rate * m, state.params, momentum)
        return TrainState(params, batch_stats, momentum), loss

    return train_step


def random_variables(model, inputs):
    """{"params", "batch_stats"} of float32 numpy arrays, the same in every process; every scale, bias and statistic is away
    from 0 and 1, so that an error in any of them shows."""
    random = np.random.default_rng(0)

    def fill(path, leaf):
        name, normal = path[-1].key, random.standard_normal(leaf.shape, np.float32)
        if name == "kernel":
            # Those of queries, keys and values have an axis of heads among their outputs.
            summed = leaf.shape[:1] if path[-2].key in ("query", "key", "value") else leaf.shape[:-1]
            return normal * np.float32(np.prod(summed) ** -0.5 * 2**0.5)
        if name in ("scale", "var"):
            # The last norm of a residual branch starts small, as in the usual recipes (there at 0): else rounding grows
            # from block to block until gradients are noise.
            middle = 0.2 if path[-2].key == "BatchNorm_2" and name == "scale" else 1.0
            return np.float32(middle) * random.uniform(0.7, 1.3, leaf.shape).astype(np.float32)
        return np.float32(0.1) * normal

    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
    return jax.tree_util.tree_map_with_path(fill, shapes)
