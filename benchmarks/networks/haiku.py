"""Haiku's own `hk.nets`."""

import haiku as hk
import jax

from . import Network, cross_entropy, image


def _network(net, x) -> Network:
    """`net()` builds the module inside the transform."""
    transformed = hk.without_apply_rng(hk.transform_with_state(lambda x, is_training: net()(x, is_training=is_training)))

    def init():
        return transformed.init(jax.random.key(0), jax.numpy.zeros(x.shape, x.dtype), True)

    def apply(params, state, x):
        return transformed.apply(params, state, x, False)[0]

    def loss(params, state, x, labels):
        logits, state = transformed.apply(params, state, x, True)
        return cross_entropy(logits, labels), state

    return Network(init, apply, loss, x)


def resnet18(small: bool) -> Network:
    if not small:
        return _network(lambda: hk.nets.ResNet18(1000), image(8, 224))
    return _network(lambda: hk.nets.ResNet(
        (1, 1, 1, 1), 10, bottleneck=False, channels_per_group=(8, 16, 16, 16), use_projection=(True, True, True, False),
        strides=(1, 2, 2, 1)),
        image(4, 32))


def mobilenet_v1(small: bool) -> Network:
    if not small:
        return _network(lambda: hk.nets.MobileNetV1(num_classes=1000), image(8, 224))
    return _network(lambda: hk.nets.MobileNetV1((1, 2), (8, 16), num_classes=10), image(4, 32))
