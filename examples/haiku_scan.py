"""Haiku: ten train steps in one call, by `lax.scan` over the batches; the loop's body is fused."""

import haiku as hk
import jax
import numpy as np
import optax
from common import arguments, batches, closing, digits, train

import jaxfuse

jaxfuse.retain_memory()  # before the first computation

STEPS = 10
OPTIMIZER = optax.adam(2e-3)


@hk.transform_with_state
def network(images, is_training):
    x = images
    for features, stride in ((32, 1), (32, 2), (64, 2)):
        x = hk.Conv2D(features, 3, stride, with_bias=False)(x)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        x = jax.nn.relu(x)
    return hk.Linear(10)(x.mean((1, 2)))


def loss_fn(params, stats, images, labels):
    logits, stats = network.apply(params, stats, None, images, True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), stats


def steps(state, images, labels):
    """images [STEPS, batch, ...]: as many updates; returns the losses [STEPS]."""

    def step(state, batch):
        params, stats, moments = state
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, *batch)
        updates, moments = OPTIMIZER.update(grads, moments)
        return (optax.apply_updates(params, updates), stats, moments), loss

    return jax.lax.scan(step, state, (images, labels))


def main():
    given, data = arguments(__doc__), digits()
    params, stats = network.init(jax.random.key(0), data[0][:1], True)
    state = params, stats, OPTIMIZER.init(params)
    calls = max(2, given.steps // STEPS)
    stacked = [tuple(map(np.stack, zip(*batches(data, 64, STEPS, seed=seed)))) for seed in range(calls)]
    runs = {}
    for name, function in (("unfused", jax.jit(steps)), ("fused", jaxfuse.fuse(steps))):
        _, losses, ms = train(name, function, state, stacked, calls)
        runs[name] = losses, ms / STEPS
    closing(jaxfuse.explain(steps, state, *stacked[0]).fused, runs)


if __name__ == "__main__":
    main()
