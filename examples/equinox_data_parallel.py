"""Equinox: a whole train step, fused, on a batch that is shared by two devices (of the host, unless there are more)."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from common import arguments, batches, closing, console, digits, train
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxfuse

jaxfuse.retain_memory()  # before the first computation

OPTIMIZER = optax.sgd(0.05, momentum=0.9)


class Network(eqx.Module):
    convs: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        sizes = ((1, 32, 1), (32, 32, 2), (32, 64, 2))
        self.convs = [eqx.nn.Conv2d(i, o, 3, s, padding=1, key=k) for (i, o, s), k in zip(sizes, keys)]
        self.head = eqx.nn.Linear(64, 10, key=keys[3])

    def __call__(self, x):
        """x: [channels, height, width]"""
        for conv in self.convs:
            x = jax.nn.relu(conv(x))
        return self.head(x.mean((1, 2)))


def step(state, images, labels):
    arrays, moments = state

    def loss_fn(arrays):
        logits = jax.vmap(eqx.combine(arrays, STATIC))(jnp.moveaxis(images, -1, 1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(arrays)
    updates, moments = OPTIMIZER.update(grads, moments)
    return (optax.apply_updates(arrays, updates), moments), loss


ARRAYS, STATIC = eqx.partition(Network(jax.random.key(0)), eqx.is_array)


def main():
    given, data = arguments(__doc__), digits()
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))
    shared, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    state = jax.device_put((ARRAYS, OPTIMIZER.init(ARRAYS)), whole)
    parts = [jax.device_put(batch, shared) for batch in batches(data, 64, given.steps)]
    console.print(f"{jax.device_count()} devices, a batch is {parts[0][0].sharding.spec}")
    runs = {}
    for name, function in (("unfused", jax.jit(step)), ("fused", jaxfuse.fuse(step))):
        _, losses, ms = train(name, function, state, parts, given.steps)
        runs[name] = losses, ms
    closing(jaxfuse.explain(step, state, *parts[0]).fused, runs)


if __name__ == "__main__":
    main()
