"""Flax linen as one trains on ImageNet: a residual network, SGD with a warmed-up cosine, smoothed labels, and an input pipeline of
threads that crop, mirror and colour while the step computes. The images are handwritten digits on photographs."""

import collections
import concurrent.futures
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import arguments, closing, console, digits, photographs, train

import jaxfuse

jaxfuse.retain_memory()  # before the first computation

SIZE, BATCH, WORKERS, AHEAD = 32, 32, 2, 4


class Bottleneck(nn.Module):
    features: int
    strides: int

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(self.features, (1, 1), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(y)))
        y = norm(scale_init=nn.initializers.zeros)(nn.Conv(4 * self.features, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(4 * self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(32, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for features, strides in ((16, 1), (32, 2)):
            x = Bottleneck(features, strides)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


MODEL = ResNet()


def augmented(random, image, ground):
    """A digit, moved and coloured, on a piece of a photograph that may be mirrored."""
    top, left = (random.integers(0, edge - SIZE) for edge in ground.shape[:2])
    ground = ground[top : top + SIZE, left : left + SIZE]
    if random.random() < 0.5:
        ground = ground[:, ::-1]
    mask = np.zeros((SIZE, SIZE, 1), np.float32)
    y, x = random.integers(0, SIZE - len(image) + 1, 2)
    mask[y : y + len(image), x : x + len(image)] = image
    return ground * 0.5 * random.random() * (1 - mask) + (0.5 + 0.5 * random.random(3)) * mask


def pipeline(steps: int, seed: int = 0):
    """Batches in a fixed order, made by threads that are AHEAD batches ahead of whoever takes them, and no more."""
    images, labels = digits(24)
    grounds = photographs()

    def made(i: int):
        random = np.random.default_rng((seed, i))
        chosen = random.integers(len(images), size=BATCH)
        batch = [augmented(random, image, grounds[random.integers(len(grounds))]) for image in images[chosen]]
        return np.stack(batch).astype(np.float32), labels[chosen]

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as threads:  # which end with the last batch, or where no more are taken
        coming: collections.deque = collections.deque()
        for i in range(steps + AHEAD):
            if i < steps:
                coming.append(threads.submit(made, i))
            if i >= AHEAD:
                yield coming.popleft().result()


def step_with(optimizer, state, images, labels):
    params, statistics, moments = state

    def loss_fn(params):
        variables = {"params": params, "batch_stats": statistics}
        logits, changed = MODEL.apply(variables, images, True, mutable=["batch_stats"])
        wanted = optax.smooth_labels(jax.nn.one_hot(labels, 10), 0.1)
        return optax.softmax_cross_entropy(logits, wanted).mean(), changed["batch_stats"]

    (loss, statistics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), statistics, moments), loss


def main():
    given = arguments(__doc__)
    rate = optax.warmup_cosine_decay_schedule(0, 0.1, max(given.steps // 10, 1), given.steps)
    optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(rate, momentum=0.9, nesterov=True))
    step = functools.partial(step_with, optimizer)

    def start():
        variables = MODEL.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)), True)
        return variables["params"], variables["batch_stats"], optimizer.init(variables["params"])

    runs = {}
    fused = jaxfuse.fuse(step, donate_argnums=0)
    for name, function in (("unfused", jax.jit(step, donate_argnums=0)), ("fused", fused)):
        state, losses, ms = train(name, function, start(), pipeline(given.steps), given.steps)
        runs[name] = losses, ms
    closing(jaxfuse.explain(step, state, *next(pipeline(1))).fused, runs)
    right = [jnp.argmax(MODEL.apply({"params": state[0], "batch_stats": state[1]}, images, False), -1) == labels
             for images, labels in pipeline(4, seed=1)]
    console.print(f"{100 * np.mean(right):.1f} % of new images are right, by the running averages")


if __name__ == "__main__":
    main()
