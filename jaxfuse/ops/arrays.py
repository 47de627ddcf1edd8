"""What several ops do with their arrays around the arithmetic: widen them, and put one number for each channel beside an array."""

import math

import jax.numpy as jnp


def wide(array):
    """In float32, or in its own dtype if that has more bits: what statistics and sums are computed in."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def other_axes(array, axis: int) -> list[int]:
    """The axes but this one, not negative: what is summed over where one number for each channel is left."""
    return [d for d in range(array.ndim) if d != axis]


def beside(array, axis: int, vector):
    """The vector `[channels]` in a shape that broadcasts against the array, whose channels lie along this axis."""
    return jnp.expand_dims(vector, other_axes(array, axis))


def as_vector(array, shape: tuple[int, ...]):
    """A per-channel operand in the shape of the channels, at least float32."""
    array = wide(jnp.asarray(array)).reshape(-1)
    return jnp.broadcast_to(array, (math.prod(shape),)).reshape(shape)
