"""max_pool: the largest value of each window, and its gradient, which goes to the first of the largest."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfuse.ops.batch_axes import BatchAxes, reshaped
from jaxfuse.ops.errors import Arguments, Array, checked_names
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.ops.stage import PLAIN, Kernel, refused_array
from jaxfuse.runtime import ffi
from jaxfuse.runtime.reasons import no_kernel
from jaxfuse.runtime.settings import ours

Pairs = tuple[tuple[int, int], ...]
UNROLLED = 64  # positions of a window up to which a program has a line for each


@dataclasses.dataclass(frozen=True)
class MaxPoolConfig:
    """Everything static about a max pool: for every dimension of x, the parameters of `lax.reduce_window`."""

    window_dimensions: tuple[int, ...]
    window_strides: tuple[int, ...]
    padding: Pairs
    base_dilation: tuple[int, ...]
    window_dilation: tuple[int, ...]
    with_residuals: bool = False  # also return the winners: which position in each window its gradient goes to

    @property
    def residual_outs(self) -> int:
        return int(self.with_residuals)

    @property
    def positions(self) -> int:
        return math.prod(self.window_dimensions)

    @property
    def winner_dtype(self):
        return jnp.uint8 if self.positions <= 256 else jnp.int32

    @property
    def dilated(self) -> bool:
        return any(d != 1 for d in (*self.base_dilation, *self.window_dilation))

    def geometry_attrs(self):
        """Of the spatial dimensions."""
        low, high = zip(*self.padding[1:-1])
        attrs = dict(window_dimensions=self.window_dimensions[1:-1], window_strides=self.window_strides[1:-1],
                     padding_low=low, padding_high=high)
        return {name: np.asarray(values, np.int64) for name, values in attrs.items()}


@checked_names
@ours
def max_pool(x: Array, window_shape: Sequence[int], *, strides: Sequence[int] | None = None,
             padding: str | Sequence[tuple[int, int]] = "VALID") -> jax.Array:
    """Max pooling, as `flax.linen.max_pool`: y[n, i, c] = max of x[n, i·stride - padding_low + [0, window), c].

    Args:
      x: float array of rank 3 to 5, channels last: `[batch, *spatial, channels]`.
      window_shape: one positive integer for each spatial dimension.
      strides: likewise; 1 by default.
      padding: "VALID", "SAME" or a (low, high) pair for each spatial dimension; filled with -inf.

    Returns: y in x's dtype; NaN where the window holds one. Its gradient goes to the first largest value of each window,
    in row-major order; where windows overlap it is summed, by the kernel in float32. Autodiff keeps the winners, a byte
    for each value of y, and without the kernel x.
    Raises: OpError (a ValueError), at trace time, for shapes, dtypes or options that do not fit.
    """
    arguments = Arguments("max_pool")
    arguments.floats(x=x)
    arguments.check(3 <= x.ndim <= 5, "x", f"of rank {x.ndim}", "rank 3, 4 or 5", "add the missing axis, or merge batch axes")
    spatial = x.ndim - 2
    window = arguments.positive_integers("window_shape", window_shape, spatial)
    strides = arguments.positive_integers("strides", (1,) * spatial if strides is None else strides, spatial)
    if isinstance(padding, str):
        arguments.one_of("padding", padding, ("SAME", "VALID"))
        padding = lax.padtype_to_pads(x.shape[1:-1], window, strides, padding)
    padding = arguments.pairs("padding", padding, spatial)
    arguments.check(min(map(min, padding)) >= 0, "padding", str(padding), "pairs of numbers that are not negative",
                    "crop x instead")
    ones = (1,) * x.ndim
    config = MaxPoolConfig((1, *window, 1), (1, *strides, 1), ((0, 0), *padding, (0, 0)), ones, ones)
    return OP(config, x)[0]


def _reference(config: MaxPoolConfig, x):
    y = lax.reduce_window(x, -jnp.inf, lax.max, config.window_dimensions, config.window_strides, config.padding,
                          config.base_dilation, config.window_dilation)
    return (y, _winners(config, *lax.stop_gradient((x, y)))) if config.with_residuals else (y,)


def _winners(config: MaxPoolConfig, x, y):
    """The rule of XLA's select-and-scatter: the winner so far stays if it is >= the next value, row by row."""
    window, strides = config.window_dimensions, config.window_strides
    pads = [(low, high, base - 1) for (low, high), base in zip(config.padding, config.base_dilation)]
    x = lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), pads)
    span = [(n - 1) * step + 1 if n else 0 for n, step in zip(y.shape, strides)]

    def next_position(position, best):
        largest, winner = best
        tap = jnp.unravel_index(position, window)
        seen = lax.dynamic_slice(x, [t * dilation for t, dilation in zip(tap, config.window_dilation)], span)
        seen = lax.slice(seen, (0,) * x.ndim, span, strides)
        stays = largest >= seen
        return jnp.where(stays, largest, seen), jnp.where(stays, winner, position.astype(winner.dtype))

    first = jnp.full_like(y, -jnp.inf), jnp.zeros_like(y, config.winner_dtype)  # sharded as y is
    return lax.fori_loop(0, config.positions, next_position, first, unroll=config.positions <= UNROLLED)[1]


def _tangent(config: MaxPoolConfig, residuals, tangents):
    """dx at the winner of each window: JAX's own rule, linear in dx and transposed to a select-and-scatter."""
    config = dataclasses.replace(config, with_residuals=False)
    return jax.jvp(functools.partial(_reference, config), residuals[:1], tuple(tangents))[1]


def _pullback(linear: Linear, x, winners, dy):
    """dx in one pass over winners and dy. Of row q of the padded x, with q = m·stride + r and r < stride, windows m, m - 1, …
    have it, at their positions r, r + stride, …"""
    config = linear.config
    if _refuse_plain(config, ()):
        return OP.transposed(linear, (x, winners, dy), _tangent)
    window, strides, low = config.window_dimensions, config.window_strides, [low for low, _ in config.padding]
    grid = [-(-(before + size) // step) for before, size, step in zip(low, x.shape, strides)]
    wide = jnp.promote_types(dy.dtype, jnp.float32)

    def rows(r):
        """Those of this r, for every m."""
        total = lax.pad(jnp.zeros_like(dy, wide), jnp.zeros((), wide), [(0, m - n, 0) for m, n in zip(grid, dy.shape)])
        for back in itertools.product(*[reversed(range(-(-(w - a) // step))) for w, a, step in zip(window, r, strides)]):
            position = np.ravel_multi_index([a + b * step for a, b, step in zip(r, back, strides)], window)
            share = jnp.where(winners == int(position), dy.astype(wide), 0)
            total += lax.pad(share, jnp.zeros((), wide), [(b, m - b - n, 0) for b, m, n in zip(back, grid, dy.shape)])
        return total.astype(x.dtype)

    every = jnp.stack([rows(r) for r in itertools.product(*map(range, strides))]).reshape(*strides, *grid)
    side_by_side = every.transpose([axis for d in range(x.ndim) for axis in (x.ndim + d, d)])
    padded = reshaped(side_by_side, [m * step for m, step in zip(grid, strides)])
    return (lax.slice(padded, low, [before + size for before, size in zip(low, x.shape)]),)


def _refuse_plain(config: MaxPoolConfig, args) -> str | None:
    if config.dilated:
        return no_kernel("a dilated window")
    if config.positions > UNROLLED:
        return f"window {config.window_dimensions}: at most {UNROLLED} positions are unrolled"
    return None


def _forward_axes(config: MaxPoolConfig, ranks) -> BatchAxes:
    return BatchAxes((0,), (0,) * (1 + config.with_residuals))


def _backward_axes(linear: Linear, ranks) -> BatchAxes:
    return BatchAxes((0,) * len(ranks), (0,))


# --- CPU kernel: our own, channels-last --------------------------------------------------------------------------


def _refuse(config: MaxPoolConfig, args) -> str | None:
    x, rank = args[0], len(args[0].shape)
    if refused := refused_array(x):
        return refused
    if not 3 <= rank <= 5:
        return f"rank {rank}: the kernel takes a batch, 1 to 3 spatial dimensions and channels"
    for name, axis in (("batch", 0), ("channel", rank - 1)):
        if (config.window_dimensions[axis], config.window_strides[axis], config.padding[axis]) != (1, 1, (0, 0)):
            return f"window {config.window_dimensions} pools axis {axis}, the {name} axis: the kernel takes channels last"
    for name in ("base_dilation", "window_dilation"):
        if any(d != 1 for d in getattr(config, name)):
            return no_kernel(f"{name} {getattr(config, name)}")
    if min(map(min, config.padding)) < 0:
        return f"negative padding {config.padding}"
    return ffi.unavailable("jaxfuse_max_pool_fwd")


def _run_forward(config: MaxPoolConfig, args, mesh_axes):
    outs = jax.eval_shape(functools.partial(_reference, config), *args)
    types = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs]
    return tuple(ffi.call("jaxfuse_max_pool_fwd", types, *args, save_winners=config.with_residuals, **config.geometry_attrs()))


def _run_backward(linear: Linear, args, mesh_axes):
    x, winners, dy = args
    attrs = linear.config.geometry_attrs()
    return tuple(ffi.call("jaxfuse_max_pool_bwd", [jax.ShapeDtypeStruct(x.shape, x.dtype)], winners, dy, **attrs))


OP = FusedOp(
    "max_pool",
    reference=_reference,
    residuals=lambda config, args, outs: (*args, *outs[1:]),
    tangent=_tangent,
    pullback=_pullback,
    for_autodiff=lambda config: dataclasses.replace(config, with_residuals=True),
    forward_kernels=(Kernel(None, _refuse, _run_forward), PLAIN._replace(refuse=_refuse_plain)),
    backward_kernels=(Kernel(None, lambda linear, args: _refuse(linear.config, args), _run_backward),
                      PLAIN._replace(refuse=lambda linear, args: _refuse_plain(linear.config, args))),
    forward_axes=_forward_axes,
    backward_axes=_backward_axes,
)
