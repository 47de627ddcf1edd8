"""Segmentation by a U-Net: handwritten digits lie on photographs, and the network says which pixels are ink."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import arguments, compared, console, digits, photographs

import jaxfuse

jaxfuse.retain_memory()  # before the first computation

SIZE, BATCH = 32, 16


class Double(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = nn.Conv(self.features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return x


class UNet(nn.Module):
    """Two convolutions with batch norm at every level, pools going down, transposed convolutions going up."""

    features: tuple[int, ...] = (16, 32)

    @nn.compact
    def __call__(self, x, train):
        skips = []
        for features in self.features[:-1]:
            x = Double(features)(x, train)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = Double(self.features[-1])(x, train)
        for features, skip in zip(reversed(self.features[:-1]), reversed(skips)):
            x = nn.ConvTranspose(features, (2, 2), (2, 2))(x)
            x = Double(features)(jnp.concatenate([skip, x], -1), train)
        return nn.Conv(1, (1, 1))(x)[..., 0]


MODEL, OPTIMIZER = UNet(), optax.adam(3e-3)


def step(state, images, ink):
    params, statistics, moments = state

    def loss_fn(params):
        variables = {"params": params, "batch_stats": statistics}
        logits, changed = MODEL.apply(variables, images, True, mutable=["batch_stats"])
        return optax.sigmoid_binary_cross_entropy(logits, ink).mean(), changed["batch_stats"]

    (loss, statistics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, moments = OPTIMIZER.update(gradients, moments)
    return (optax.apply_updates(params, updates), statistics, moments), loss


def scenes(steps: int, seed: int = 0):
    """Batches (images [BATCH, SIZE, SIZE, 3], ink float32 [BATCH, SIZE, SIZE]): a digit in some colour on a piece of a photograph."""
    grounds, (written, _) = photographs(), digits(SIZE // 2)
    random = np.random.default_rng(seed)
    for _ in range(steps):
        images, ink = np.empty((BATCH, SIZE, SIZE, 3), np.float32), np.zeros((BATCH, SIZE, SIZE), np.float32)
        for image, mask in zip(images, ink):
            ground = grounds[random.integers(len(grounds))]
            top, left = (random.integers(0, edge - SIZE) for edge in ground.shape[:2])
            y, x = random.integers(0, SIZE // 2, 2)
            mask[y : y + SIZE // 2, x : x + SIZE // 2] = written[random.integers(len(written)), ..., 0]
            image[:] = ground[top : top + SIZE, left : left + SIZE] * (1 - mask[..., None]) + random.random(3) * mask[..., None]
        yield images, (ink > 0.5).astype(np.float32)


@jaxfuse.fuse
def is_ink(params, statistics, images):
    return MODEL.apply({"params": params, "batch_stats": statistics}, images, False) > 0


def overlap(state) -> float:
    """Intersection over union of ink on scenes that the network has not seen."""
    params, statistics, _ = state
    found, true = zip(*[(np.asarray(is_ink(params, statistics, images)), ink > 0.5) for images, ink in scenes(4, seed=1)])
    found, true = np.stack(found), np.stack(true)
    return (found & true).sum() / max((found | true).sum(), 1)


def main():
    given = arguments(__doc__)

    def start():
        variables = MODEL.init(jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)), True)
        return variables["params"], variables["batch_stats"], OPTIMIZER.init(variables["params"])

    for name, state in compared(step, start, scenes(given.steps)).items():
        console.print(f"{name}: intersection over union of ink {overlap(state):.2f}")


if __name__ == "__main__":
    main()
