"""Which axes attention's arrays have, by letters as in `einsum`: t the rows of q, s the keys, d what they are multiplied along,
e the columns of v; every other letter is of the batch."""

import dataclasses
import math

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Everything static about an attention: out = (softmax(scale · q·k + bias) · factor) · v, with `fill` for the scores where the
    mask is False. A letter that an array lacks is an axis along which it is repeated; `out` has all letters of the batch."""

    q: str
    k: str
    v: str
    out: str
    bias: str | None = None
    mask: str | None = None
    factor: str | None = None
    scale: float = 1.0
    fill: float = 0.0
    out_dtype: str = "float32"
    with_residuals: bool = False  # also return, of each row, the largest score and 1/Σe^(score - largest)

    @property
    def residual_outs(self) -> int:
        return 2 * self.with_residuals

    @property
    def batch(self) -> str:
        return "".join(letter for letter in self.out if letter not in "te")

    @property
    def scores(self) -> str:
        return self.batch + "ts"

    def unpack(self, args):
        """(q, k, v, bias, mask, factor) from the op's argument list, None for what is absent."""
        q, k, v, *rest = args
        rest = iter(rest)
        return q, k, v, *[None if spec is None else next(rest) for spec in (self.bias, self.mask, self.factor)]

    def sizes(self, q, k, v) -> dict[str, int]:
        """How long each letter's axis is."""
        return {letter: n for spec, a in ((self.q, q), (self.k, k), (self.v, v)) for letter, n in zip(spec, a.shape)}

    def item_axes(self) -> tuple[int | None, ...]:
        """The axis of q, k, v, bias, mask, factor (those there are), out and a row's statistics along which items of the batch lie."""
        item = next((letter for letter in self.batch if all(letter in spec for spec in (self.q, self.k, self.v))), None)
        specs = self.q, self.k, self.v, self.bias, self.mask, self.factor, self.out, self.scores
        return tuple(spec.index(item) if item is not None and item in spec else None for spec in specs if spec is not None)


def strides(spec: str, shape: tuple[int, ...], letters: str) -> tuple[int, ...]:
    """From one item to the next along each letter's axis of a row-major array, in elements; 0 along those it lacks."""
    own = {letter: math.prod(shape[d + 1 :]) for d, letter in enumerate(spec)}
    return tuple(own.get(letter, 0) for letter in letters)


def to_layout(array, spec: str, letters: str):
    """The array, whose axes are `spec`, with an axis for each of these letters, of length 1 where it is repeated."""
    array = jnp.transpose(array, [spec.index(letter) for letter in letters if letter in spec])
    return jnp.expand_dims(array, [d for d, letter in enumerate(letters) if letter not in spec])
