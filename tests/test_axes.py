"""The index map of analysis/axes.py: where the elements of a value come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfuse.analysis.axes import IndexMap
from jaxfuse.program.graph import Graph


def gathered(index_map: IndexMap, array):
    """What the map says that its value is."""
    index = np.zeros((), np.int64)
    for sub_axes in index_map.sub_axes:
        own = np.zeros((), np.int64)
        for stride, n in sub_axes:
            own = own[..., None] + stride * np.arange(n)
        index = index[..., None] + own.reshape(-1)
    return np.asarray(array).reshape(-1)[index]


def walked(function, array) -> tuple[IndexMap | None, np.ndarray]:
    """The map of what the function makes of the array, and the value itself."""
    index_map, value = IndexMap.of(array.shape), array
    for node in Graph(jax.make_jaxpr(function)(array)).nodes:
        moved = index_map and index_map.then(node)
        index_map, (value,) = moved, node.replay([value])
    return index_map, value


@pytest.mark.parametrize("seed", range(20))
def test_a_map_is_what_it_says(seed):
    rng = np.random.default_rng(seed)
    x = np.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)

    def moved(x):
        for _ in range(rng.integers(1, 6)):
            split = [n for n in x.shape for n in ([2, n // 2] if n in (4, 6) and rng.random() < 0.4 else [n])]
            x = x.reshape([1] * (rng.random() < 0.3) + split)
            x = x.transpose(rng.permutation(x.ndim)) if rng.random() < 0.7 else x
            if rng.random() < 0.3:
                x = lax.broadcast_in_dim(x, (3, *x.shape), range(1, x.ndim + 1))
        return x

    index_map, value = walked(moved, x)
    if index_map is not None:
        assert index_map.shape == value.shape
        np.testing.assert_array_equal(gathered(index_map, x), value)


MOVES = {
    "split and merged again": lambda x: x.reshape(2, 3, 8).reshape(6, 8),
    "halves of both": lambda x: x.reshape(2, 3, 2, 4).transpose(0, 2, 1, 3).reshape(4, 12),
    "repeated": lambda x: jnp.broadcast_to(x[:, None], (6, 5, 8)).reshape(30, 8),
    "repeated inside": lambda x: jnp.broadcast_to(x[:, :, None], (6, 8, 3)).reshape(6, 24),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    x = np.arange(48).reshape(6, 8)
    index_map, value = walked(MOVES[name], x)
    np.testing.assert_array_equal(gathered(index_map, x), value)


def test_a_sub_axis_that_is_split_has_no_map():
    assert walked(lambda x: x.T.reshape(3, 16), np.arange(48).reshape(6, 8))[0] is None
    assert walked(lambda x: x.T.reshape(16, 3), np.arange(48).reshape(6, 8))[0] is not None


def test_what_is_stacked_is_found_again():
    index_map = IndexMap.of((4, 8)).without({0}).stacked(0, 1, 2)
    assert index_map.is_stacked and index_map.shape == (2, 8)
    first, second = (Graph(jax.make_jaxpr(lambda x: x[i : i + 1])(np.zeros((2, 8)))).nodes[0] for i in range(2))
    assert index_map.then(first) is None
    assert index_map.then(second) == IndexMap(((), ((1, 8),)))


def test_an_elementwise_function_of_two_values():
    rows = IndexMap.of((4, 6)).without({1})
    columns = IndexMap.of((4, 6)).without({0})
    shape = (4, 6)
    left = IndexMap((*rows.sub_axes, ())).repeated_to(shape)
    right = IndexMap(((), *columns.sub_axes)).repeated_to(shape)
    assert left.merged_with(right) == IndexMap.of(shape)
    assert left.merged_with(IndexMap((((1, 4),), ())).repeated_to(shape)) is None
