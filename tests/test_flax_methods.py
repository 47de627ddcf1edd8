"""Methods of Flax linen modules whose layers are ours: what Flax lets others see and change of a call, and methods that compute nothing."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse.flax.linen as fnn

X = jnp.linspace(-1, 1, 12).reshape(2, 6)


class Network(nn.Module):
    features: int = 4

    def setup(self):
        self.layer = nn.Dense(self.features)

    def __call__(self, x):
        return nn.relu(self.layer(x))

    def initial(self, batch):
        return jnp.zeros((batch, self.features))

    def part(self):
        return self.layer


class Rematerialised(nn.Module):
    @nn.remat
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(4)(x))


PAIRS = {
    "a layer": (nn.Dense(4), fnn.Dense(4)),
    "a layer, exchanged": (nn.Dense(4), fnn.replace(nn.Dense(4))),
    "a network": (Network(), fnn.replace(Network())),
    "a method with a transform": (Rematerialised(), fnn.replace(Rematerialised())),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_call_is_intercepted_and_captured_once(name):
    def doubled(call, args, kwargs, context):
        y = call(*args, **kwargs)
        return y * 2 if context.method_name == "__call__" else y

    def seen(module):
        variables = module.init(jax.random.key(0), X)
        with nn.intercept_methods(doubled):
            changed = module.apply(variables, X)
        return changed, *module.apply(variables, X, capture_intermediates=True)

    plain, ours = map(seen, PAIRS[name])
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_is_captured_is_the_layers_output():
    layer = fnn.Dense(4, activation=nn.relu)
    y, captured = layer.apply(layer.init(jax.random.key(0), X), X, capture_intermediates=True)
    (own,) = captured["intermediates"]["__call__"]
    np.testing.assert_array_equal(own, y)


class Both(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4)
        return nn.Dropout(0.5, deterministic=False)(layer(x)), layer


def test_a_method_that_returns_a_module_draws_the_same_numbers():
    variables = Both().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    plain, ours = (module.apply(variables, X, rngs={"dropout": jax.random.key(2)})[0] for module in (Both(), fnn.replace(Both())))
    np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_methods_that_compute_nothing():
    module = fnn.replace(Network())
    assert module.initial(3).shape == (3, 4)
    variables = module.init(jax.random.key(0), X)
    assert isinstance(module.apply(variables, method="part"), nn.Dense)
    np.testing.assert_array_equal(module.bind(variables).part()(X), Network().bind(variables).layer(X))
