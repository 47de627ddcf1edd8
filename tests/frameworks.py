"""Layers of each framework as a function and its weights: (apply, weights), of which `apply(weights, x)` is the program."""

import equinox as eqx
import haiku as hk
import jax
from flax import nnx

KEY = jax.random.key(0)


def linen(module, x, **call):
    return lambda variables, x: module.apply(variables, x, **call), module.init(KEY, x)


def nnx_module(make):
    """Of the module that `make` makes of random numbers."""
    graph, state = nnx.split(make(nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graph, state)(x), state


def haiku(make, x):
    net = hk.without_apply_rng(hk.transform(lambda x: make()(x)))
    return net.apply, net.init(KEY, x)


def equinox(layer, vmaps, *call):
    """Of a layer of one example, under so many vmaps; `call`: its further arguments."""

    def apply(arrays, x):
        layer = eqx.combine(arrays, rest)
        fn = lambda x: layer(x, *call)
        for _ in range(vmaps):
            fn = jax.vmap(fn)
        return fn(x)

    arrays, rest = eqx.partition(layer, eqx.is_array)
    return apply, arrays


def keras_layer(layer, x, **call):
    layer.build(x.shape)
    state = [v.value for v in layer.non_trainable_variables]
    return lambda weights, x: layer.stateless_call(weights, state, x, **call)[0], [v.value for v in layer.trainable_variables]
