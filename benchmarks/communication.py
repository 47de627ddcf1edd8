"""python -m benchmarks.communication: what a data-parallel program sends between devices, as XLA has compiled it.

The batch is divided over 8 simulated devices, and nothing is run: the collectives of the compiled programs are counted, with the
bytes of their operands. Both are the same for any number of devices. docs/scaling.md says what follows for thousands.
"""

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import jaxfuse

from . import cases, inputs, layers_jax

DEVICES = 8
KINDS = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(?:-start)?\(")
BYTES = {"pred": 1, "s32": 4, "u32": 4, "f32": 4, "bf16": 2, "f16": 2}
BATCHED = "x", "residual", "q", "k", "v"  # operands of a layer that have a batch axis
LAYERS = ("conv3x3_c64_s56", "depthwise3x3_c192_s28", "dense_c768_c3072_gelu", "bn_add_relu_c256_s56", "layer_norm_c768",
          "group_norm_silu_c96_s56", "attention_h12_c768", "lstm_h512", "gru_h512")


class Sent(NamedTuple):
    """The collectives of one program: how many of them, which kinds, and the bytes that each device puts in."""

    count: int
    bytes: int
    kinds: frozenset[str]


def sent(compiled: str) -> Sent:
    """Of the text of a compiled program."""
    found = COLLECTIVE.findall(compiled)
    sizes = [BYTES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
             for shapes, _ in found for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)]
    return Sent(len(found), sum(sizes), frozenset(kind for _, kind in found))


def compiled(function: Callable, arguments, batch_axes) -> Sent:
    """`function(*arguments)`, of types, each divided along its batch axis or, where that is None, the same on all devices."""
    mesh = jax.make_mesh((DEVICES,), ("batch",), axis_types=(AxisType.Auto,))

    def placed(array, axis):
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "batch")
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    types = [jax.tree.map(partial(placed, axis=axis), argument) for argument, axis in zip(arguments, batch_axes)]
    return sent(jax.jit(function).lower(*types).compile().as_text())


class Layer(NamedTuple):
    title: str
    parameters: int  # bytes of the gradients of all its parameters
    forward: Sent
    both: Sent  # forward and gradient


def layer(name: str, fuse: Callable) -> Layer:
    """What one layer of benchmarks/cases.py sends, by itself."""
    case = next(case for case in cases.CASES if case.name.startswith(f"{name}.") and (case.dtype, case.task) == ("f32", "gradient"))
    arrays, cotangent = inputs.operands(replace(case, batch=DEVICES))
    linear, activation = layers_jax.layer(case)
    function = fuse(lambda *arguments: activation(linear(*arguments)))

    def both(cotangent, *arguments):
        y, pullback = jax.vjp(function, *arguments)
        return y, pullback(cotangent)

    along = 1 if case.kind == "recurrent" else 0
    axes = [along if name in BATCHED else None for name in arrays]
    parameters = sum(array.nbytes for name, array in arrays.items() if name not in BATCHED)
    operands = list(arrays.values())
    return Layer(case.shape.title, parameters, compiled(function, operands, axes), compiled(both, [cotangent, *operands], [along, *axes]))


def resnet50(fuse: Callable) -> tuple[int, Sent]:
    """(bytes of its parameters, what its train step sends)."""
    from . import models

    return _step(models.ResNet50(), jax.ShapeDtypeStruct((DEVICES, 224, 224, 3), jnp.float32), fuse)


def bert_base(fuse: Callable) -> tuple[int, Sent]:
    from . import cost

    return _step(cost.Bert(), jax.ShapeDtypeStruct((DEVICES, 128), jnp.int32), fuse)


def _step(model, x, fuse: Callable) -> tuple[int, Sent]:
    from . import models

    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    state = models.TrainState(variables["params"], variables.get("batch_stats", {}), variables["params"])
    labels = jax.ShapeDtypeStruct((DEVICES,), jnp.int32)
    found = compiled(models.make_train_step(model, fuse), [state, x, labels], [None, 0, 0])
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params)), found


def main() -> None:
    flags = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    os.environ.update(XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}", JAX_PLATFORMS="cpu")  # JAX reads them when it first computes
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    ways = {"fused": partial(jaxfuse.fuse, policy="always"), "unfused": lambda function: function}
    table = Table("layer, f32", "parameters KB", title="Collectives of a layer, and the KB that each device puts in", title_justify="left")
    for way in ways:
        for direction in ("forward", "gradient"):
            table.add_column(f"{way}, {direction}", justify="right")
    for name in LAYERS:
        found = [layer(name, fuse) for fuse in ways.values()]
        cells = [_cell(each) for one in found for each in (one.forward, _beyond(one.both, one.forward))]
        table.add_row(found[0].title, f"{found[0].parameters / 1e3:.1f}", *cells)
    console.print(table)
    table = Table("train step, f32", "parameters KB", *ways, title="The same of train steps", title_justify="left")
    for title, network in (("ResNet-50", resnet50), ("BERT-base, 128 tokens", bert_base)):
        steps = [network(fuse) for fuse in ways.values()]
        table.add_row(title, f"{steps[0][0] / 1e3:.1f}", *(_cell(step) for _, step in steps))
    console.print(table)


def _beyond(both: Sent, forward: Sent) -> Sent:
    return Sent(both.count - forward.count, both.bytes - forward.bytes, both.kinds - forward.kinds)


def _cell(found: Sent) -> str:
    others = sorted(found.kinds - {"all-reduce"})
    return "–" if not found.count else f"{found.count}, {found.bytes / 1e3:.1f} KB" + (f" ({', '.join(others)})" if others else "")


if __name__ == "__main__":
    main()
