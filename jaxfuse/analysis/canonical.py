"""Spellings made equal: what a value *is*, however it was written. Two questions, answered from the graph alone
(statistics are `statistics.py`'s):

    per_channel(value, like, axis)    is this operand one number for each channel of `like`?   reshapes, broadcasts, casts
    regions(value)                    is what happens to this value one elementwise function?  then `region_table` says which
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.axes import is_long
from jaxfuse.analysis.elementwise import POINTS, RULES, is_elementwise, table_of, values_of
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.program.graph import Node, Value

ADD = ("add", "add_any")
CAST = "convert_element_type"


@dataclasses.dataclass(frozen=True)
class NotPerChannel:
    reason: str


def size(value: Value) -> int:
    return math.prod(value.shape)


def per_channel(value: Value, like: Value, axes: int | tuple[int, ...]) -> Value | NotPerChannel:
    """The smallest value that `value` repeats along every axis of `like` but `axes` (`[channels]` in some shape, or one
    number), or the reason why there is none. Under `vmap` the channels may be several axes, of which no one repeats."""
    axes = (axes,) if isinstance(axes, int) else axes
    channels = math.prod(like.shape[axis] for axis in axes)
    if value.ndim not in (0, like.ndim):
        return NotPerChannel(f"operand of shape {list(value.shape)} against {list(like.shape)}")
    elsewhere = varying_axes(value) - set(axes)
    if elsewhere:
        along = " and ".join(map(str, axes)) or "squeezed away"
        return NotPerChannel(f"operand {value!r} varies along axis {min(elsewhere)}, the channel axis is {along}")
    smallest: Value | None = None
    source: Value | None = value
    while source is not None:
        smallest = source if size(source) in (1, channels) else smallest
        source = _repeated(source)
    if smallest is not None:
        return smallest
    return NotPerChannel(f"operand {value!r} is not one number for each of the {channels} channels")


def _repeated(value: Value) -> Value | None:
    """What the value repeats: through broadcasts, reshapes, widening casts, and transposes of what has one axis only."""
    node = value.producer
    if node is None or node.primitive not in (*RESHAPES, CAST, "transpose"):
        return None
    (inner,) = node.inputs
    narrowed = node.primitive == CAST and not widens(node)
    return None if narrowed or node.primitive == "transpose" and len(lengths(value)) > 1 else inner


def repeats(value: Value) -> bool:
    """Whether it is a smaller value, broadcast."""
    return varying_axes(value) != {axis for axis, n in enumerate(value.shape) if is_long(n)}


def varying_axes(value: Value) -> set[int]:
    """Axes along which the value may change; broadcasts are seen through."""
    axes = {i for i, n in enumerate(value.shape) if is_long(n)}
    node = value.producer
    if node is None:
        return axes
    if node.primitive == "broadcast_in_dim":
        return {node.params["broadcast_dimensions"][i] for i in varying_axes(node.inputs[0])} & axes
    if node.primitive in ("pvary", CAST):
        return varying_axes(node.inputs[0])
    factored = scaled(node)
    return axes if factored is None else varying_axes(factored[0])


def scaled(node: Node) -> tuple[Value, float] | None:
    """(value, c), where the node gives value·c with a number c; a sum over no axes, as `vmap` makes of the transpose of a
    mean over the batch, is one."""
    if node.primitive == "psum" and not node.params["axes"] and len(node.inputs) == 1:
        return node.inputs[0], 1.0
    if node.primitive == "neg":
        return node.inputs[0], -1.0
    for value in node.inputs if node.primitive in ("mul", "div") else ():
        factor = scale_factor(node, value)
        if factor:
            return value, factor
    return None


# --- elementwise functions ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Region:
    """The elementwise function that `nodes` compute from `start` alone. Of them only `end` is read outside, and `masks`,
    comparisons that autodiff keeps of it."""

    start: Value
    end: Value
    nodes: tuple[Node, ...]
    masks: tuple[Value, ...] = ()

    def replay(self, array, wanted: tuple[Value, ...]) -> list:
        """The wanted values for another array in place of `start`."""
        made = {self.start: array}
        for node in self.nodes:
            (made[node.out],) = node.replay([made[v] if v in made else held(v) for v in node.inputs])
        return [made[v] for v in wanted]


LONGEST_FUNCTION = 24  # nodes; jax.nn.gelu with tanh is 8, mish by hand 10


def regions(start: Value, is_returned: Callable[[Value], bool], ignored: frozenset[int] = frozenset()) -> list[Region]:
    """Every region that starts here, shortest first; readers with an index in `ignored` do not count."""
    inside: dict[int, Node] = {}
    values = [start]
    found, frontier = [], {n.index: n for n in start.users}
    while frontier and len(inside) < LONGEST_FUNCTION:
        node = frontier.pop(min(frontier))
        if node.index in ignored or is_float_cast(node):  # a step of its own: dtypes decide how far a kernel may go
            continue
        if not (is_elementwise(node) and all(v in values or constant(v) is not None for v in node.inputs)):
            continue
        inside[node.index] = node
        values.append(node.out)
        frontier |= {n.index: n for n in node.out.users if n.index not in inside}
        read = [v for v in values if is_returned(v) or any(n.index not in inside and n.index not in ignored for n in v.users)]
        masks = tuple(v for v in read if v.dtype == bool and not is_returned(v))
        ends = [v for v in read if v not in masks]
        if len(ends) == 1 and ends[0] is not start and jnp.issubdtype(ends[0].dtype, jnp.floating):
            found.append(Region(start, ends[0], tuple(inside[i] for i in sorted(inside)), masks))
    return found


def is_float_cast(node: Node) -> bool:
    """Between floats of 16 bits and more. Those of 8 bits are formats of storage: what is rounded to them stays rounded."""
    return node.primitive == CAST and all(
        jnp.issubdtype(v.dtype, jnp.floating) and v.dtype.itemsize > 1 for v in (node.inputs[0], node.out))


def widens(cast: Node) -> bool:
    """Whether the cast loses nothing, by JAX's rules of promotion. Floats of 8 bits and integers of 4 have none: they stay
    what the program makes of them."""
    try:
        return jnp.promote_types(cast.inputs[0].dtype, cast.out.dtype) == cast.out.dtype
    except jax.dtypes.TypePromotionError:
        return False


def unwidened(value: Value) -> Value:
    """What a widening cast was made of, if it is one: kernels compute in float32 all the same."""
    node = value.producer
    if node is not None and is_float_cast(node) and node.inputs[0].literal is None and widens(node):
        return node.inputs[0]
    return value


def uncast(value: Value, *also: str) -> Value:
    """What casts, and the primitives `also`, were made of."""
    while value.producer is not None and value.producer.primitive in (CAST, *also):
        value = value.producer.inputs[0]
    return value


def constant(value: Value, depth: int = 8) -> float | None:
    """The real number, if the value is one number that the program fixes: written into it, broadcast, cast, or computed from
    such numbers (jnp.var divides by `144 - ddof`) in a few steps, at most `depth` deep."""
    if value.literal is not None:
        return float(value.literal) if np.ndim(value.literal) == 0 and not np.iscomplexobj(value.literal) else None
    node = value.producer
    if node is None or depth == 0:
        return None
    if node.primitive in (*RESHAPES, CAST):
        return constant(node.inputs[0], depth - 1)
    if node.primitive == "reduce_sum" and node.inputs[0].literal is None:  # a mask of ones, counted
        one = constant(node.inputs[0], depth - 1)
        return None if one is None else one * (size(node.inputs[0]) // max(1, size(value)))
    if node.primitive not in RULES:
        return None
    operands = [constant(v, depth - 1) for v in node.inputs]
    return None if None in operands else float(RULES[node.primitive](node.params, *operands))


def chosen(value: Value) -> Value:
    """What a select whose condition the program fixes always gives: a mask that masks nothing."""
    node = value.producer
    if node is None or node.primitive != "select_n":
        return value
    which = constant(node.inputs[0])
    return value if which is None else node.inputs[1 + int(which)]


def region_table(region: Region, points: np.ndarray = POINTS) -> np.ndarray | None:
    """Value and derivative of the region's function on these points, by default those of analysis/elementwise.py."""
    return table_of(lambda x: region.replay(x, (region.end,))[0], region.start.aval, points)


def region_values(region: Region, wanted: tuple[Value, ...], points: np.ndarray) -> np.ndarray | None:
    """What values of the region are at these points of its argument."""
    return values_of(lambda x: region.replay(x, wanted), region.start.aval, points)


def mask_tables(region: Region) -> tuple[np.ndarray | None, np.ndarray | None]:
    """What the masks are on the points of analysis/elementwise.py, and what they would be if they were computed from the function's
    value instead of its argument. Where both agree, as for x > 0 and relu(x) > 0, nothing needs to keep the argument."""
    ends = region_values(region, (region.end,), POINTS)
    if ends is None:
        return None, None
    return region_values(region, region.masks, POINTS), region_values(region, region.masks, ends[0])


def held(value: Value):
    """What a constant value of the program holds."""
    return value.literal if value.literal is not None else filled(value, constant(value))


def filled(value: Value, number):
    """The number in the value's shape and type, sharded along explicit axes of a mesh and varying over those of a `shard_map`."""
    sharding = value.aval.sharding if any(value.spec) else None
    varying = tuple(value.aval.manual_axis_type.varying)
    full = jax.lax.broadcast_in_dim(jnp.asarray(number, value.dtype), value.shape, (), out_sharding=sharding)
    return jax.lax.pcast(full, varying, to="varying") if varying else full


def lengths(value: Value) -> list[int]:
    return [n for n in value.shape if is_long(n)]


def scale_factor(node: Node, value: Value) -> float | None:
    """c, where the node is value·c or value/(1/c) with a number c."""
    if node.primitive not in ("mul", "div") or node.inputs[0] is node.inputs[1]:
        return None
    left, right = node.inputs
    number = constant(right if left is value else left)
    if not number or node.primitive == "div" and left is not value:
        return None
    return number if node.primitive == "mul" else 1 / number


def is_square(node: Node, value: Value) -> bool:
    if node.primitive == "integer_pow":
        return node.params["y"] == 2
    if node.primitive == "mul":
        return node.inputs[0] is value and node.inputs[1] is value
    return node.primitive == "square"
