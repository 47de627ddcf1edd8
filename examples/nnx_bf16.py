"""Flax nnx: a network of plain nnx layers, exchanged by fused ones with one line, trained in bf16 with f32 parameters."""

import jax.numpy as jnp
import optax
from common import arguments, batches, closing, console, digits, train
from flax import nnx

import jaxfuse
from jaxfuse.flax.nnx import exchanged, explain, replace

jaxfuse.retain_memory()  # before the first computation


class Block(nnx.Module):
    def __init__(self, inputs: int, outputs: int, strides: int, rngs: nnx.Rngs):
        options = dict(use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), strides, **options)
        self.norm1 = nnx.BatchNorm(outputs, dtype=jnp.bfloat16, rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), **options)
        self.norm2 = nnx.BatchNorm(outputs, dtype=jnp.bfloat16, rngs=rngs)
        self.shortcut = nnx.Conv(inputs, outputs, (1, 1), strides, **options)

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        sizes = ((1, 32, 1), (32, 32, 1), (32, 64, 2))
        self.blocks = nnx.List([Block(*size, rngs) for size in sizes])
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)).astype(jnp.float32))


@nnx.jit
def step(model, optimizer, images, labels):
    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main():
    given, data = arguments(__doc__), digits()
    runs = {}
    for name in ("unfused", "fused"):
        model = Network(nnx.Rngs(0))
        if name == "fused":
            replace(model)  # the one line
        optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)

        def in_place(state, images, labels, model=model, optimizer=optimizer):
            return state, step(model, optimizer, images, labels)

        _, losses, ms = train(name, in_place, None, batches(data, 64, given.steps), given.steps)
        runs[name] = losses, ms
    layers = [layer for layer in exchanged(model) if layer.was is not layer.now]
    console.print(f"exchanged: {len(layers)} layers")
    closing(explain(model, data[0][:64]).fused, runs)


if __name__ == "__main__":
    main()
