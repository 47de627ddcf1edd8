"""The normal form of a node: what it computes, however it was written. A *view*: a replay keeps the user's nodes.

A node is a sum of values times numbers, a product of values to powers, or neither:

    x - y, -x, c·x, x/c, psum(x, ())        sums:      x + (-1)·y,  (-1)·x,  c·x,  (1/c)·x,  1·x
    x·y, x/y, x·x, square(x), rsqrt(x)      products:  x·y,  x·y⁻¹,  x²,  x²,  x^(-1/2)

And what an operand is: a number that the program fixes (`constant`), a widened value (`unwidened`), or one number for each channel
of another value, through reshapes, broadcasts and casts (`per_channel`).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.axes import is_long
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.program.elementwise import RULES, is_known
from jaxfuse.program.graph import Node, Value
from jaxfuse.runtime import private

ADD = ("add", "add_any")
CAST = "convert_element_type"
EXACT = 2**53  # up to here a float64 is every integer


@dataclasses.dataclass(frozen=True)
class _Terms:
    terms: tuple[tuple[Value, float], ...]


class Sum(_Terms):
    """Σ value·number"""


class Product(_Terms):
    """Π value^number"""


def _product(*terms: tuple[Value, float]) -> Sum | Product:
    """Equal factors together; a factor that is a number makes it a sum of one."""
    (first, power), *rest = terms
    if rest and rest[0][0] is first:
        return Product(((first, power + rest[0][1]),))
    for (value, exponent), (number, sign) in (terms, terms[::-1]) if rest else ():
        if exponent == 1 and (c := constant(number)):
            return Sum(((value, c**sign),))
    return Product(terms)


# primitive -> the normal form of a node of it, by its parameters and operands; None: this one has none
NORMAL: dict[str, Callable[..., Sum | Product | None]] = {
    "add": lambda p, x, y: Sum(((x, 1.0), (y, 1.0))),
    "add_any": lambda p, x, y: Sum(((x, 1.0), (y, 1.0))),
    "sub": lambda p, x, y: Sum(((x, 1.0), (y, -1.0))),
    "neg": lambda p, x: Sum(((x, -1.0),)),
    "mul": lambda p, x, y: _product((x, 1.0), (y, 1.0)),
    "div": lambda p, x, y: _product((x, 1.0), (y, -1.0)),
    "square": lambda p, x: Product(((x, 2.0),)),
    "integer_pow": lambda p, x: Product(((x, float(p["y"])),)),
    "pow": lambda p, x, y: None if (c := constant(y)) is None else Product(((x, c),)),
    "sqrt": lambda p, x: Product(((x, 0.5),)),
    "rsqrt": lambda p, x: Product(((x, -0.5),)),
    "psum": lambda p, *xs: None if p["axes"] or len(xs) > 1 else Sum(((xs[0], 1.0),)),  # vmap's, of the transpose of a mean
}


def normal(node: Node) -> Sum | Product | None:
    return NORMAL[node.primitive](node.params, *node.inputs) if node.primitive in NORMAL else None


def scaled(node: Node) -> tuple[Value, float] | None:
    """(value, c), where the node gives value·c with a number c."""
    form = normal(node)
    return form.terms[0] if isinstance(form, Sum) and len(form.terms) == 1 else None


def scale_factor(node: Node, value: Value) -> float | None:
    """c, where the node is value·c with a number c."""
    known = scaled(node)
    return known[1] if known and known[0] is value else None


# --- numbers -----------------------------------------------------------------------------------------------------


def constant(value: Value, depth: int = 8, example: bool = False) -> float | None:
    """The real number, if the value is one number that the program fixes: written into it, broadcast, cast, or computed from
    such numbers (jnp.var divides by `144 - ddof`) in a few steps, at most `depth` deep. Floats overflow to infinity; None where
    an integer wraps around. With `example` also of sizes that are not known, as `private.example` has them, their sums and products."""
    number, dtype = _constant(value, depth, example), value.dtype
    if number is not None and jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return number if max(int(info.min), -EXACT) <= number <= min(int(info.max), EXACT) else None
    if number is not None and jnp.issubdtype(dtype, jnp.floating) and abs(number) > float(jnp.finfo(dtype).max):
        return math.copysign(math.inf, number)
    return number


def _constant(value: Value, depth: int, example: bool) -> float | None:
    if value.literal is not None:
        return float(value.literal) if np.ndim(value.literal) == 0 and not np.iscomplexobj(value.literal) else None
    node = value.producer
    if node is None or depth == 0:
        return None
    if example and node.primitive == "dim_as_value":
        return private.example(node.params["dim"])
    if node.primitive in RESHAPES:
        return constant(node.inputs[0], depth - 1, example)
    if node.primitive == "reduce_sum" and node.inputs[0].literal is None:  # a mask of ones, counted
        one = constant(node.inputs[0], depth - 1, example)
        return None if one is None else one * (size(node.inputs[0]) // max(1, size(value)))
    if not is_known(node):
        return None
    example = example and node.primitive in (*ADD, "sub", "mul", "div", "neg", CAST)  # others may choose between numbers
    operands = [constant(v, depth - 1, example) for v in node.inputs]
    return None if None in operands else float(RULES[node.primitive](node.params, *operands))


def chosen(value: Value) -> Value:
    """What a select whose condition the program fixes, or a product with 1, always gives: a mask that masks nothing."""
    node = value.producer
    if node is None or node.primitive not in ("select_n", "mul"):
        return value
    if node.primitive == "mul":
        same, number = scaled(node) or (value, 1.0)
        return same if number == 1 and same.shape == value.shape else value
    which = constant(node.inputs[0])
    return value if which is None else node.inputs[1 + int(which)]


def size(value: Value) -> int:
    return math.prod(value.shape)


def is_smaller(value: Value, other: Value) -> bool:
    """Whether it has fewer elements; where a size is symbolic, of a representative batch."""
    return private.known(size(value)) < private.known(size(other))


def nbytes(value: Value) -> int:
    return size(value) * value.dtype.itemsize


# --- casts -------------------------------------------------------------------------------------------------------


def is_float_cast(node: Node) -> bool:
    """Between floats of 16 and 32 bits. Those of 8 bits are formats of storage: what is rounded to them stays rounded. No kernel
    computes in 64."""
    return node.primitive == CAST and all(
        jnp.issubdtype(v.dtype, jnp.floating) and v.dtype.itemsize in (2, 4) for v in (node.inputs[0], node.out))


def is_rounded(value: Value, sources: Iterable[Value]) -> bool:
    """Whether it is of 16 bits that none of its sources has: what a cast makes of it next is not what a kernel would, which rounds once."""
    return value.dtype.itemsize == 2 and all(value.dtype != source.dtype for source in sources)


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
    """What casts between floats of 16 bits and more, and the primitives `also`, were made of."""
    while value.producer is not None and (is_float_cast(value.producer) or value.producer.primitive in also):
        value = value.producer.inputs[0]
    return value


def narrowest(value: Value) -> Value:
    """What widening casts were made of."""
    while (inner := unwidened(value)) is not value:
        value = inner
    return value


# --- one number for each channel ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NotPerChannel:
    reason: str


def per_channel(value: Value, like: Value, axes: int | tuple[int, ...]) -> Value | NotPerChannel:
    """The smallest value that `value` repeats along every axis of `like` but `axes` (`[channels]` in some shape, or one
    number), or the reason why there is none. Under `vmap` the channels may be several axes, of which no one repeats."""
    axes = (axes,) if isinstance(axes, int) else axes
    channels = math.prod(like.shape[axis] for axis in axes)
    if value.ndim not in (0, like.ndim):
        return NotPerChannel(f"operand of shape {list(value.shape)} against {list(like.shape)}")
    varying, along = varying_axes(value), " and ".join(map(str, axes)) or "squeezed away"
    if elsewhere := varying - set(axes):
        return NotPerChannel(f"operand {value!r} varies along axis {min(elsewhere)}, the channel axis is {along}")
    if varying and varying != {axis for axis in axes if is_long(like.shape[axis])}:
        some = " and ".join(map(str, sorted(varying)))
        return NotPerChannel(f"operand {value!r} varies along axis {some} alone, the channel axes are {along}")
    smallest: Value | None = None
    source: Value | None = value
    while source is not None:
        smallest = source if size(source) in (1, channels) else smallest
        source = _repeated(source)
    if smallest is not None:
        return smallest
    return NotPerChannel(f"operand {value!r} is not one number for each of the {channels} channels")


def channel_factor(node: Node, axes: int | tuple[int, ...]) -> tuple[Value, Value] | None:
    """(x, c), where the node gives x·c or x/c with one number c for each channel."""
    for x, factor in {"mul": (node.inputs, node.inputs[::-1]), "div": (node.inputs,)}.get(node.primitive, ()):
        c = per_channel(factor, x, axes) if x.shape == node.out.shape and x is not factor else None
        if isinstance(c, Value):
            return x, c
    return None


def _repeated(value: Value) -> Value | None:
    """What the value repeats: through broadcasts, reshapes, widening casts, and transposes of what has one axis only."""
    node = value.producer
    if node is None or node.primitive not in (*RESHAPES, CAST, "transpose"):
        return None
    (inner,) = node.inputs
    narrowed = node.primitive == CAST and not widens(node)
    return None if narrowed or node.primitive == "transpose" and sum(map(is_long, value.shape)) > 1 else inner


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
