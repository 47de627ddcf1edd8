"""DP-SGD (Abadi et al. 2016): the gradient of every sample, clipped, summed, and noise added. With vmap each convolution has one weight
gradient for each sample, which XLA computes slowly."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from common import arguments, batches, compared, console, digits

import jaxfuse

jaxfuse.retain_memory()  # before the first computation

LARGEST_NORM, NOISE, BATCH = 1.0, 0.5, 64


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


MODEL, OPTIMIZER = Network(), optax.sgd(0.2, momentum=0.9)


def loss_of_one(params, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(MODEL.apply(params, image[None]), label[None]).mean()


def step(state, images, labels):
    params, moments, key = state
    key, noise_key = jax.random.split(key)
    losses, gradients = jax.vmap(jax.value_and_grad(loss_of_one), (None, 0, 0))(params, images, labels)
    norms = jax.vmap(optax.global_norm)(gradients)
    shares = jnp.minimum(1, LARGEST_NORM / norms)  # no sample counts for more than LARGEST_NORM
    leaves, tree = jax.tree.flatten(gradients)
    noisy = [jnp.tensordot(shares, leaf, 1) + NOISE * LARGEST_NORM * jax.random.normal(k, leaf.shape[1:])
             for leaf, k in zip(leaves, jax.random.split(noise_key, len(leaves)))]
    mean = jax.tree.unflatten(tree, [leaf / len(images) for leaf in noisy])
    updates, moments = OPTIMIZER.update(mean, moments)
    return (optax.apply_updates(params, updates), moments, key), losses.mean()


def main():
    given, data = arguments(__doc__), digits()

    def start():
        params = MODEL.init(jax.random.key(0), data[0][:1])
        return params, OPTIMIZER.init(params), jax.random.key(1)

    states = compared(step, start, batches(data, BATCH, given.steps))
    for name, (params, *_) in states.items():
        right = jnp.argmax(MODEL.apply(params, data[0]), -1) == data[1]
        console.print(f"{name}: {100 * right.mean():.1f} % of all digits are right")


if __name__ == "__main__":
    main()
