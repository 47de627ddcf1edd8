"""A residual CNN of Equinox modules: one image at a time, channels first, under `vmap` with an axis name."""

import equinox as eqx
import jax

from . import Network, cross_entropy, image


class Block(eqx.Module):
    conv1: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    conv2: eqx.nn.Conv2d
    norm2: eqx.nn.BatchNorm

    def __init__(self, channels, mode, key):
        keys = jax.random.split(key, 2)
        self.conv1 = eqx.nn.Conv2d(channels, channels, 3, padding=1, key=keys[0])
        self.norm1 = eqx.nn.BatchNorm(channels, "batch", mode=mode)
        self.conv2 = eqx.nn.Conv2d(channels, channels, 3, padding=1, use_bias=False, key=keys[1])
        self.norm2 = eqx.nn.BatchNorm(channels, "batch", mode=mode)

    def __call__(self, x, state):
        y, state = self.norm1(self.conv1(x), state)
        y, state = self.norm2(self.conv2(jax.nn.relu(y)), state)
        return jax.nn.relu(x + y), state


class CNN(eqx.Module):
    stem: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, channels, blocks, classes, mode, key):
        stem, head, *keys = jax.random.split(key, 2 + blocks)
        self.stem = eqx.nn.Conv2d(3, channels, 5, stride=2, padding=2, key=stem)
        self.norm = eqx.nn.BatchNorm(channels, "batch", mode=mode)
        self.blocks = [Block(channels, mode, k) for k in keys]
        self.head = eqx.nn.Linear(channels, classes, key=head)

    def __call__(self, x, state):
        x, state = self.norm(self.stem(x), state)
        x = jax.nn.relu(x)
        for block in self.blocks:
            x, state = block(x, state)
        return self.head(x.mean((1, 2))), state


def cnn(small: bool, mode: str) -> Network:
    sizes = (8, 1, 10) if small else (64, 4, 1000)

    def build():
        return eqx.nn.make_with_state(CNN)(*sizes, mode, jax.random.key(0))

    model, state = eqx.filter_eval_shape(build)
    arrays, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    state_leaves, state_tree = jax.tree.flatten(state)

    def init():
        model, state = build()
        return eqx.filter(model, eqx.is_array), jax.tree.leaves(state)

    def run(params, state, x, inference):
        model = eqx.nn.inference_mode(eqx.combine(params, static), inference)
        state = jax.tree.unflatten(state_tree, state)
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    def apply(params, state, x):
        return run(params, state, x, True)[0]

    def loss(params, state, x, labels):
        logits, state = run(params, state, x, False)
        return cross_entropy(logits, labels), jax.tree.leaves(state)

    return Network(init, apply, loss, image(4 if small else 8, 32 if small else 224, channels_first=True))
