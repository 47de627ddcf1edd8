"""A vision transformer with dropout in its attention: pieces of a digit are tokens. The dropped scores are never in memory."""

import flax.linen as nn
import jax
import optax
from common import arguments, batches, compared, digits

import jaxfuse

jaxfuse.retain_memory()  # before the first computation

RATE = 0.1


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        attention = nn.MultiHeadDotProductAttention(4, dropout_rate=RATE, broadcast_dropout=False, deterministic=not train)
        x = x + attention(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dropout(RATE, deterministic=not train)(nn.Dense(x.shape[-1])(y))


class Network(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(64, (2, 2), (2, 2))(images)  # a token for every 2×2 pixels
        x = x.reshape(len(x), -1, x.shape[-1])
        x = x + self.param("places", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(2):
            x = Layer()(x, train)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


MODEL, OPTIMIZER = Network(), optax.adamw(1e-3)


def step(state, images, labels):
    params, moments, key = state
    key, dropped = jax.random.split(key)

    def loss_fn(params):
        logits = MODEL.apply(params, images, True, rngs={"dropout": dropped})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments, key), loss


def main():
    given, data = arguments(__doc__), digits()

    def start():
        params = MODEL.init(jax.random.key(0), data[0][:1], False)
        return params, OPTIMIZER.init(params), jax.random.key(1)

    compared(step, start, batches(data, 32, given.steps))


if __name__ == "__main__":
    main()
