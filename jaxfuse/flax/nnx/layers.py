"""Flax nnx's layers, fused: `import jaxfuse.flax.nnx as fnnx`, then `fnnx.Conv` where it said `nnx.Conv`.

Each layer is a subclass of Flax's own and computes what that computes, through `jaxfuse.fuse`: constructor arguments, state,
initialisers, RNG use, masks, dtypes, metadata and errors are Flax's, so that checkpoints load both ways. Beyond that, most
take `activation`, any function of one array, and, when called, `residual`, of the shape of the result:

    y = activation(layer(x) + residual)                       in one pass over memory, where a kernel can

Whatever no kernel takes runs as Flax's own layer would. Inside a function that is fused as a whole, and inside `fused` methods,
the layers are plain and the whole is fused: a network built of them is not cut into pieces.
"""

import functools

from flax import nnx

from jaxfuse.fuse import inline
from jaxfuse.program.stateful import holds_state
from jaxfuse.program.signature import is_part_of_a_program


def fused(method):
    """Decorates a method of an `nnx.Module`: what it computes, layers and all, is fused as one program.

    The state that it changes (statistics, RNG counts) is updated as ever. A method that changes the module otherwise
    (new variables, attributes) runs as it is.
    """

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if is_part_of_a_program() or holds_state((args, kwargs)):  # the state of the arguments is to change too
            return method(self, *args, **kwargs)
        graphdef, state = nnx.split(self)
        graphs = []

        def pure(state, *args, **kwargs):
            module = nnx.merge(graphdef, state)
            out = method(module, *args, **kwargs)
            graph, after = nnx.split(module)
            graphs.append(graph)
            return out, after

        out, after = inline(pure)(state, *args, **kwargs)
        if graphs[-1] != graphdef:
            return method(self, *args, **kwargs)
        before = dict(nnx.to_flat_state(state))
        changed = [(path, leaf) for path, leaf in nnx.to_flat_state(after) if _array(leaf) is not _array(before[path])]
        nnx.update(self, nnx.from_flat_state(changed))
        return out

    return call


def _array(leaf):
    """What a leaf of a state holds: a variable's, or an array that is an attribute of a module."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


class Fused(nnx.Module):
    """Mixed into a module: its call is fused."""

    @fused
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class Epilogue(nnx.Module):
    """Mixed into a layer: `activation(layer(x) + residual)`, fused."""

    activation = None  # of layers that were exchanged, and never had the argument

    def __init__(self, *args, activation=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = activation

    @fused
    def __call__(self, *args, residual=None, **kwargs):
        y = super().__call__(*args, **kwargs)
        if residual is not None:
            y = y + residual
        return y if self.activation is None else self.activation(y)


class Conv(Epilogue, nnx.Conv):
    """`flax.nnx.Conv`, and after it a residual add and an activation."""


class ConvTranspose(Epilogue, nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose`, and after it a residual add and an activation."""


class Linear(Epilogue, nnx.Linear):
    """`flax.nnx.Linear`, and after it a residual add and an activation."""


class BatchNorm(Epilogue, nnx.BatchNorm):
    """`flax.nnx.BatchNorm`, and after it a residual add and an activation."""


class LayerNorm(Epilogue, nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, and after it a residual add and an activation."""


class RMSNorm(Epilogue, nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, and after it a residual add and an activation."""


class GroupNorm(Epilogue, nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, and after it a residual add and an activation."""


class LSTMCell(Fused, nnx.LSTMCell):
    """`flax.nnx.LSTMCell`, fused."""


class OptimizedLSTMCell(Fused, nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell`, fused."""


class GRUCell(Fused, nnx.GRUCell):
    """`flax.nnx.GRUCell`, fused."""


class RNN(Fused, nnx.RNN):
    """`flax.nnx.RNN`, the whole sequence fused."""


# Flax's layer -> ours
EXCHANGE = {layer.__bases__[1]: layer for layer in (
    Conv, ConvTranspose, Linear, BatchNorm, LayerNorm, RMSNorm, GroupNorm, LSTMCell, OptimizedLSTMCell, GRUCell, RNN)}
