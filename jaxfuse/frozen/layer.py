"""A layer with a constant weight as a convolution, whose filter can be packed: a dense layer is one of one tap."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxfuse.ops.conv.config import ConvConfig
from jaxfuse.ops.dense import DenseConfig
from jaxfuse.program.graph import Node


@dataclasses.dataclass(frozen=True)
class Layer:
    """A convolution, with the shape of its filter; or a dense layer, whose rows are the pixels of images. These have x's own axes, where
    a convolution may have as many: XLA copies an array whose axes are others before a layer is written over it."""

    config: ConvConfig
    shape: tuple[int, ...]
    weight: tuple[int, ...] = ()  # a dense layer's, its shape
    contracted: tuple[int, ...] | None = None  # axes of that; None: it is a convolution

    @property
    def products(self) -> int:
        """For one element of the output."""
        return math.prod(self.shape) // self.shape[self.config.rhs_spec[0]]

    @property
    def is_dense(self) -> bool:
        return self.contracted is not None

    @property
    def layout(self) -> str:
        """What the order of a packed filter depends on: of a dense layer's not the axes of x."""
        if self.is_dense:
            return f"{self.shape[-2:]} {self.contracted}"
        return f"{self.shape} {self.config.rhs_spec} {self.config.rhs_dilation[-1]}"

    def types(self, x, w) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Of the convolution's input and filter."""
        return jax.ShapeDtypeStruct(self.images(x.shape), x.dtype), jax.ShapeDtypeStruct(self.shape, w.dtype)

    def images(self, shape: tuple) -> tuple:
        """The convolution's input is of this shape where the layer's is of `shape`."""
        if self.contracted is None:
            return shape
        return (*_pixels(shape[: len(shape) - len(self.contracted)]), self.shape[-2])

    def keeps_axes(self, x, y) -> bool:
        """Whether the convolution's output has the axes of the layer's, y."""
        return not self.is_dense or (*self.images(x.shape)[:-1], self.shape[-1]) == y.shape

    def _order(self, contracted: tuple[int, ...]) -> list[int]:
        """The weight's axes as the filter has them."""
        return [*contracted, *(d for d in range(len(self.weight)) if d not in contracted)]

    def filter(self, w):
        return w if self.contracted is None else w.transpose(self._order(self.contracted)).reshape(self.shape)

    def weight_of(self, filter_):
        """The inverse of `filter`."""
        if self.contracted is None:
            return filter_
        order = self._order(self.contracted)
        return filter_.reshape([self.weight[d] for d in order]).transpose(np.argsort(order))

    def run(self, convolve: Callable, node: Node, x, rest: Sequence):
        """The node's output: `convolve` takes x and what is read behind the filter."""
        if self.contracted is None:
            return convolve(x, *rest)
        images, features = self.images(x.shape), self.shape[-1]
        shapes = [(features,)] * self.config.has_bias + [(*images[:-1], features)] * self.config.has_residual
        y = convolve(x.reshape(images), *[a.reshape(shape) for a, shape in zip(rest, shapes)])
        return y.reshape(node.out.shape)


def layer_of(node: Node) -> Layer | str:
    """The layer that the node is, or why it is none."""
    if node.primitive not in ("jaxfuse_conv", "jaxfuse_dense"):
        return "it is not fused; jaxfuse.explain says why"
    (x, w, *_), config = node.inputs, node.params["config"]
    return Layer(config, tuple(w.shape)) if node.primitive == "jaxfuse_conv" else _dense(config, x, w)


def _dense(config: DenseConfig, x, w) -> Layer | str:
    pairs = sorted(zip(config.x_contracted, config.w_contracted))
    if config.x_batch or config.residual_outs or [d for d, _ in pairs] != list(range(x.ndim - len(pairs), x.ndim)):
        return f"axes {config.x_contracted} of {x!r} are contracted, {config.x_batch} are batch axes: expected rows by one matrix"
    if not str(x.dtype) == str(w.dtype) == config.out_dtype:
        return f"dtypes {x.dtype}, {w.dtype} -> {config.out_dtype}: expected one dtype"
    inner = math.prod(w.shape[d] for d in config.w_contracted)
    n = len(_pixels(x.shape[: x.ndim - len(pairs)])) - 1
    ones, images = (1,) * n, (0, n + 1, *range(1, n + 1))
    one_tap = ConvConfig(ones, ((0, 0),) * n, ones, 1, images, (n + 1, n, *range(n)), images, ones, has_bias=config.has_bias,
                         has_residual=config.has_residual, activation=config.activation, precision=config.precision)
    return Layer(one_tap, (*ones, inner, math.prod(w.shape) // max(inner, 1)), tuple(w.shape), tuple(d for _, d in pairs))


def _pixels(rows: tuple) -> tuple:
    """Axes of rows as those of images, a batch and one to three others: as they are, or all rows in the batch."""
    return rows if 2 <= len(rows) <= 4 else (math.prod(rows), 1)
