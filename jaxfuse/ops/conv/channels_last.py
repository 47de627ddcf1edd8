"""A depthwise convolution of a sequence in another layout, run channels last, where its loops are; transposes between two of them
cancel. Of images oneDNN has kernels for channels first too, which are as fast as this."""

import dataclasses
from itertools import compress

import jax.numpy as jnp
import numpy as np

from jaxfuse.ops.stage import Kernel


def _refuse(config, x, w) -> str | None:
    if not config.feature_group_count == x.shape[config.lhs_spec[1]] == w.shape[config.rhs_spec[0]]:
        return "no depthwise convolution"
    if len(config.lhs_spec) != 3:
        return "more than one spatial dimension"
    if config == channels_last(config):
        return "channels last already"
    return None


def channels_last(config):
    n = len(config.lhs_spec)
    image, window = (0, n - 1, *range(1, n - 1)), (n - 1, n - 2, *range(n - 2))
    return dataclasses.replace(config, lhs_spec=image, rhs_spec=window, out_spec=image)


def forward(refuse, run) -> Kernel:
    """From the kernel's functions for channels last."""

    def run_so(config, args, mesh_axes):
        out = _orders(config)[2]
        orders = _of_arguments(config)
        found = run(channels_last(config), [_transposed(a, order) for a, order in zip(args, orders)], mesh_axes)
        return tuple(_transposed_back(f, out) for f in found)

    return Kernel(None, lambda config, args: _refuse(config, *args[:2]) or refuse(config, args), run_so)


def backward(refuse, run) -> Kernel:
    def run_so(linear, args, mesh_axes):
        config = linear.config
        x, w, out = _orders(config)
        own = _of_arguments(config)
        types = tuple(t if order is None else t.update(shape=tuple(t.shape[d] for d in order)) for t, order in zip(linear.types, own))
        reordered = dataclasses.replace(linear, config=channels_last(config), types=types)
        orders = x, w, *[out] * (len(args) - 2)
        found = run(reordered, [_transposed(a, order) for a, order in zip(args, orders)], mesh_axes)
        return tuple(map(_transposed_back, found, compress(own, linear.active)))

    return Kernel(None, lambda linear, args: _refuse(linear.config, *args[:2]) or refuse(linear, args), run_so)


def _orders(config):
    """Axes of x, w and the output in the order of channels last."""
    images = [(spec[0], *spec[2:], spec[1]) for spec in (config.lhs_spec, config.out_spec)]
    window = config.rhs_spec
    return images[0], (*window[2:], window[1], window[0]), images[1]


def _of_arguments(config):
    """The same of all arguments, None of those that have no such axes."""
    x, w, out = _orders(config)
    return (x, w, *compress((None, None, out), (config.has_scale, config.has_bias, config.has_residual)))


def _transposed(array, order):
    return array if order is None else jnp.transpose(array, order)


def _transposed_back(array, order):
    return array if order is None else jnp.transpose(array, tuple(np.argsort(order)))
