"""Flax linen and optax: a residual network, gradients accumulated over microbatches, donated state, and a checkpoint by orbax
from which training goes on as if it had never stopped, bit for bit."""

import functools
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from common import arguments, batches, closing, console, digits, train

import jaxfuse

jaxfuse.retain_memory()  # before the first computation

MICROBATCHES = 2


class Residual(nn.Module):
    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        for features, strides in ((16, 1), (32, 2), (64, 2)):
            x = Residual(features, strides)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


MODEL, OPTIMIZER = Network(), optax.adamw(2e-3)


def loss_fn(params, stats, images, labels):
    logits, updates = MODEL.apply({"params": params, "batch_stats": stats}, images, True, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updates["batch_stats"]


def step(state, images, labels):
    """One update from the mean gradient of the microbatches."""
    params, stats, moments = state

    def accumulate(carry, microbatch):
        grads, stats = carry
        (loss, stats), more = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, *microbatch)
        return (jax.tree.map(jnp.add, grads, more), stats), loss

    split = [a.reshape(MICROBATCHES, -1, *a.shape[1:]) for a in (images, labels)]
    zeros = jax.tree.map(jnp.zeros_like, params)
    (grads, stats), losses = jax.lax.scan(accumulate, (zeros, stats), split)
    updates, moments = OPTIMIZER.update(jax.tree.map(lambda g: g / MICROBATCHES, grads), moments, params)
    return (optax.apply_updates(params, updates), stats, moments), losses.mean()


def start(images):
    variables = MODEL.init(jax.random.key(0), images[:1], True)
    return variables["params"], variables["batch_stats"], OPTIMIZER.init(variables["params"])


def resumes_exactly(fast, state, data) -> bool:
    """Whether saving, loading and training on gives the very numbers of training on."""
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(Path(folder) / "state", state)
    ends = []
    for begin in (state, restored):
        for batch in data:
            begin, _ = fast(jax.tree.map(jnp.copy, begin), *batch)  # fast takes over the memory of what it is given
        ends.append(begin)
    return all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, ends)))


def main():
    given, data = arguments(__doc__), digits()
    fast = jaxfuse.fuse(jax.jit(step, donate_argnums=0))
    report = jaxfuse.explain(step, start(data[0]), *next(batches(data, 64, 1)))
    runs = {}
    for name, function in (("unfused", jax.jit(step, donate_argnums=0)), ("fused", fast)):
        state, losses, ms = train(name, function, start(data[0]), batches(data, 64, given.steps), given.steps)
        runs[name] = losses, ms
    closing(report.fused, runs)
    same = resumes_exactly(fast, state, list(batches(data, 64, 3, seed=1)))
    console.print("resumed from a checkpoint: " + ("bit for bit the same" if same else "NOT the same"))


if __name__ == "__main__":
    main()
