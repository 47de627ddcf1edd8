"""What an activation computes is found out once for each way to write it, whatever the sizes of the arrays."""

import jax
import jax.numpy as jnp
import pytest

from jaxfuse.patterns import activations
from recognition import patterns
from spellings.activations import ACTIVATIONS

SHAPES = [(4, 6), (2, 3, 6), (1, 1, 1, 5)]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(activations, "_tables", {})
    return activations._tables


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_one_table_for_all_shapes(name, tables):
    for spelling in ACTIVATIONS[name]:
        tables.clear()
        counts, fused = [], set()
        for shape in SHAPES:
            fused |= set(patterns(lambda x, w: spelling(x @ w), jnp.ones(shape), jnp.ones((shape[-1], 7)))[0])
            counts.append(len(tables))
        assert counts == [counts[0]] * len(SHAPES) and counts[0] > 0 and len(fused) == 1


def test_functions_that_shapes_alone_tell_apart(tables):
    """A constant that is the size of the array is a number as any other."""
    for n in (2, 3):
        patterns(lambda x, w: jnp.where(x @ w > n, x @ w, 0), jnp.ones((n, n)), jnp.ones((n, n)))
        patterns(lambda x, w: jax.nn.leaky_relu(x @ w, 1 / n), jnp.ones((n, n)), jnp.ones((n, n)))
    assert len(tables) == 4


def test_only_shapes_are_left_out():
    def of(text):
        return activations._of_any_shape(text, (5,))

    assert of("a:f32[5] = mul b:f32[5] 5.0:f32[]") == "a:f32[shape] = mul b:f32[shape] 5.0:f32[]"
    assert of("{'shape': (5,), 'broadcast_dimensions': ()}") == "{'shape': [shape], 'broadcast_dimensions': ()}"
    for other in ("f32[15]", "f32[5,5]", "axes=(5,)", "y=5", "[5]", "'axes': (5,)"):
        assert of(other) == other
    rule = object()
    assert activations._of_any_shape(rule, (5,)) is rule and activations._of_any_shape("f32[]", ()) == "f32[]"
