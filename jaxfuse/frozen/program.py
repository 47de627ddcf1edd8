"""A program some of whose inputs are constants: which of its values they fix, and what is left to compute at every call."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxfuse.analysis.normal import constant, is_float_cast, repeats, size, widens
from jaxfuse.frozen.leaves import weakly
from jaxfuse.ops.arrays import beside, wide
from jaxfuse.patterns.walk import Chain, Walk, WalkEnd
from jaxfuse.program.equations import closed_over
from jaxfuse.program.graph import Emission, Graph, Node, Value, compute, evaluate
from jaxfuse.runtime.private import is_symbolic, is_symbolic_size
from jaxfuse.runtime.settings import unwatched

SMALL = 1 << 16  # bytes; of the constants themselves a value that is larger than they are is no constant: a broadcast


@dataclasses.dataclass(frozen=True)
class Fold:
    """A contraction of x with a constant weight, scaled by a constant for each of its features, and shifted:

        (conv(x, w) - center)·scale + offset = conv(x, w·scale) + (offset - center·scale)

    `chain` is the scale and the shift; `features` the axis of the weight that makes the outputs' features, `axis` that of the outputs.
    """

    node: Node
    x: Value
    w: Value
    features: int
    axis: int
    chain: Chain

    @property
    def exact(self) -> Value:
        """The weight before it was rounded to the contraction's dtype: it is folded so, and rounded once."""
        cast = self.w.producer
        return cast.inputs[0] if cast is not None and is_float_cast(cast) and not widens(cast) else self.w

    @property
    def types(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Of the scaled weight, and of the shift of each feature."""
        shift = jax.ShapeDtypeStruct((self.w.shape[self.features],), jnp.promote_types(self.chain.end.dtype, jnp.float32))
        return weakly(self.w.aval), shift

    @property
    def needs(self) -> tuple[Value, ...]:
        return self.exact, *[value for _, value in self.chain.affine]


class Freed(Exception):
    """A bound input is needed that has been freed."""


class Program:
    """`closed` with its first `bound` inputs, and what it closes over, constant.

    `constants` are names of the arrays that it needs at a call, by what they are computed from: two programs of one function, for two
    batch sizes, have the same names for the same arrays. `folds` are the contractions whose weight takes in a scale. `unshared` gives
    the array itself, or the copy that is kept of it, of what nested functions close over.
    """

    def __init__(self, closed: ClosedJaxpr, bound: int, unshared: Callable[[Any], Any]):
        jaxpr = closed.jaxpr
        given = (*jaxpr.constvars, *jaxpr.invars)
        self.graph = Graph(ClosedJaxpr(jaxpr.replace(constvars=(), invars=given), ()))
        self.graph.constant_arrays = list(map(unshared, self.graph.constant_arrays))
        self.bound = len(jaxpr.constvars) + bound
        self.arguments = len(given) - self.bound
        self._fixed = self._fixed_values()
        names = [*[f"closed over {id(array)}" for array in closed.consts], *[f"bound {i}" for i in range(bound)]]
        self._names: dict[Value, str] = dict(zip(self.graph.inputs, names))
        self.folds = {fold.chain.end: fold for fold in self._folds()}
        self._needed = list(self._needed_values())
        self.constants = [self._name(value) for value in self._needed]
        self.constants += [name for fold in self.folds.values() for name in self._fold_names(fold)]

    def __call__(self, constants: Sequence, arguments: Sequence) -> list:
        """The outputs. `constants` are in the order of their names."""
        arrays = dict(zip(self._needed, constants))
        folded = iter(constants[len(self._needed) :])
        replacements = {value: _known(value, array) for value, array in arrays.items() if value.producer is not None}
        replacements |= {end: _contraction(fold, next(folded), next(folded)) for end, fold in self.folds.items()}
        inputs = [arrays.get(value) for value in self.graph.inputs[: self.bound]]
        return evaluate(self.graph, [*inputs, *arguments], replacements)

    @unwatched
    def values(self, leaves: Sequence, wanted: set[str]) -> dict[str, Any]:
        """The constants of these names, computed from the bound inputs. Raises `Freed` where one that they need is None."""
        environment = {v: array for v, array in zip(self.graph.inputs, leaves) if array is not None}
        environment |= zip(self.graph.constants, self.graph.constant_arrays)
        found: dict[str, Any] = {}
        with jax.ensure_compile_time_eval():
            for value, name in zip(self._needed, self.constants):
                if name in wanted:
                    (found[name],) = self._computed([value], environment)
            for fold in self.folds.values():
                names = self._fold_names(fold)
                if wanted & set(names):
                    found |= zip(names, _folded(fold, self._computed(fold.needs, environment)))
        return found

    def _computed(self, wanted: Sequence[Value], environment: dict) -> list:
        stack, seen = list(wanted), set(environment)
        while stack:
            value = stack.pop()
            if value.literal is None and value not in seen:
                if value.producer is None:
                    raise Freed
                seen.add(value)
                stack += value.producer.inputs
        return compute(wanted, environment, {})

    @property
    def types(self) -> tuple[list, list]:
        """Of the constants, in the order of their names, and of the arguments."""
        folded = [type_ for fold in self.folds.values() for type_ in fold.types]
        needed, given = ([weakly(v.aval) for v in values] for values in (self._needed, self.graph.inputs[self.bound :]))
        return [*needed, *folded], given

    @property
    def spent(self) -> set[int]:
        """Indices of the bound inputs that no other program of the function will need: weights that were folded or cast whole."""
        used = set(self._needed) | {v for v in self.graph.inputs[: self.bound] if size(v) * v.dtype.itemsize <= SMALL}
        folded, dead = {fold.exact: fold.node for fold in self.folds.values()}, self.graph.initially_dead
        return {i for i, v in enumerate(self.graph.inputs[: self.bound]) if v.users and v not in used
                and all(user.index not in dead and (user is folded.get(v) or is_float_cast(user)) for user in v.users)}

    @functools.cached_property
    def sources(self) -> dict[str, list[str]]:
        """By the names of constants that are weights the lines of the layers that read them."""
        found: dict[str, list[str]] = {}
        folds = {fold.node: fold for fold in self.folds.values()}
        for node in self.graph.nodes:
            weighted = _weighted(node)
            if weighted and weighted.w in self._fixed:
                fold = folds.get(node)
                found.setdefault(self._fold_names(fold)[0] if fold else self._name(weighted.w), []).append(node.source())
        return found

    def _fixed_values(self) -> set[Value]:
        """Those that depend on the constants alone. Random numbers of a constant key are; what is broadcast is not."""
        fixed = {*self.graph.inputs[: self.bound], *self.graph.constants}
        for node in self.graph.nodes:
            unknown = is_symbolic([v.aval for v in node.outputs]) or any(map(is_symbolic_size, node.params.values()))
            drawn = node.primitive == "rng_uniform"  # anew at each call
            differs = any(v.aval.manual_axis_type.varying for v in node.outputs)  # from device to device
            if not (node.eqn.effects or drawn or differs or unknown) and all(v.literal is not None or v in fixed for v in node.inputs):
                made, given = (sum(size(v) * v.dtype.itemsize for v in values) for values in (node.outputs, node.inputs))
                fixed |= set(node.outputs) if made <= max(SMALL, given) else set()
        return fixed

    def _folds(self) -> Iterator[Fold]:
        for node in self.graph.nodes:
            found = _weighted(node)
            if found and found.w in self._fixed and found.x not in self._fixed and _holds_a_scale(found.w, node.out):
                chain = self._scaled(node, found.axis)
                if chain:
                    yield Fold(node, *found, chain)

    def _scaled(self, node: Node, axis: int) -> Chain | None:
        """The longest chain of steps with a constant for each feature of which one is a factor; it ends with such a step."""
        chains, _ = Walk(self.graph, axis, set(), name_activation=lambda region: WalkEnd("not looked for")).chains(node.out)
        fitting = [chain for chain in chains if chain.layout.is_identity and chain.residual is None and chain.affine
                   and chain.nodes[-1].primitive not in ("convert_element_type",)
                   and all(value in self._fixed or value.literal is not None for _, value in chain.affine)]
        scaled = [chain for chain in fitting if any(kind in ("mul", "div") for kind, _ in chain.affine)]
        return scaled[-1] if scaled else None

    def _needed_values(self) -> dict[Value, None]:
        """The fixed values that a call begins with, in order of need. Numbers that the program itself fixes, such as the limits of
        `jnp.clip`, and broadcasts stay in it, where patterns read them."""
        needed: dict[Value, None] = {}
        seen: set[Value] = set()
        stack = [*self.graph.outputs, *[v for node in self.graph.nodes if node.eqn.effects for v in node.inputs]]
        while stack:
            value = stack.pop()
            if value in seen or value.literal is not None:
                continue
            seen.add(value)
            if value in self._fixed and constant(value) is None and not repeats(value):
                if value not in self.graph.constants:
                    needed[value] = None
            elif value in self.folds:
                stack.append(self.folds[value].x)
            elif value.producer is not None:
                stack += value.producer.inputs
        return needed

    def _name(self, value: Value) -> str:
        """By what the value is computed from: a digest of the equation, of its parameters and of the names of its inputs."""
        pending = [value]
        while pending:
            value = pending[-1]
            if value in self._names:
                pending.pop()
                continue
            inputs = [v for v in (value.producer.inputs if value.producer else ()) if v.literal is None and v not in self._names]
            if not inputs:
                self._names[value] = self._digest(value)
            pending += inputs
        return self._names[value]

    def _fold_names(self, fold: Fold) -> tuple[str, str]:
        """Those of the weight and the shift: by what these are computed from."""
        parts = [self._name_or_literal(v) for v in (fold.w, *fold.needs)]
        text = f"{fold.features} {[kind for kind, _ in fold.chain.affine]} {parts} {fold.chain.end.dtype}"
        name = hashlib.sha256(text.encode()).hexdigest()
        return f"weight {name}", f"shift {name}"

    def _name_or_literal(self, value: Value) -> str:
        return self._name(value) if value.literal is None else f"{value.literal!r} {value!r}"

    def _digest(self, value: Value) -> str:
        node = value.producer
        if node is None:
            return _of_array(self.graph.constant_arrays[self.graph.constants.index(value)])
        parts = [self._name_or_literal(v) for v in node.inputs]
        params = sorted((name, _text(param)) for name, param in node.params.items())
        text = f"{node.primitive} {params} {node.eqn.ctx.threefry_partitionable} {parts} {node.outputs.index(value)}"
        return hashlib.sha256(text.encode()).hexdigest()


def _text(param) -> str:
    """What tells parameters of equations apart."""
    if isinstance(param, (tuple, list)):
        return f"({', '.join(map(_text, param))})"
    if isinstance(param, np.ndarray):
        return _of_array(param)
    return " ".join([str(param), *map(_of_array, closed_over(param))])


def _of_array(array) -> str:
    """By its contents."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    contents = np.asarray(jax.random.key_data(array) if is_key else array)
    return f"{array.dtype}{array.shape} {hashlib.sha256(contents.tobytes()).hexdigest()}"


def _known(value: Value, array) -> Emission:
    return Emission((), (value,), lambda read: [(value, array)])


def _contraction(fold: Fold, weight, shift) -> Emission:
    end, operands = fold.chain.end, fold.node.inputs

    def run(read):
        (y,) = fold.node.replay([weight if v is fold.w else read(v) for v in operands])
        yield end, (wide(y) + beside(y, fold.axis, shift)).astype(end.dtype)

    return Emission((fold.x,), (end,), run)


def _folded(fold: Fold, arrays: Sequence) -> tuple[jax.Array, jax.Array]:
    """The weight times the scale, and the shift, computed in float64."""
    weight, *small = (np.asarray(a).astype(np.float64) for a in arrays)
    channels = fold.w.shape[fold.features]
    known = {value: array for (_, value), array in zip(fold.chain.affine, small)}

    def vector(value: Value):
        array = np.float64(value.literal) if value.literal is not None else known[value]
        return np.broadcast_to(np.reshape(array, -1), (channels,))

    with np.errstate(all="ignore"):  # a zero variance is the user's
        center, scale, offset = fold.chain.coefficients(vector)
        shift = np.zeros(channels) if offset is None else offset
        shift = shift if center is None else shift - center * scale
        shape = [channels if d == fold.features else 1 for d in range(weight.ndim)]
        weight = weight * np.reshape(scale, shape)
    weight_type, shift_type = fold.types
    return jax.device_put(weight.astype(weight_type.dtype)), jax.device_put(shift.astype(shift_type.dtype))


def _holds_a_scale(weight: Value, out: Value) -> bool:
    """Whether scaled weights are near enough in the weight's own type, whatever the scale: not in integers and narrow floats, which
    round, overflow and become subnormal, nor where the outputs are of a wider type; nor are complex ones folded."""
    floats = (jnp.bfloat16, jnp.float32, jnp.float64)
    return weight.dtype in floats and jnp.promote_types(weight.dtype, out.dtype) == weight.dtype


class _Weighted(NamedTuple):
    """The operands of a convolution or a product; `features` is the only axis of w that makes outputs, `axis` that of the output."""

    x: Value
    w: Value
    features: int
    axis: int


def _weighted(node: Node) -> _Weighted | None:
    if node.primitive == "conv_general_dilated" and node.params["batch_group_count"] == 1:
        numbers = node.params["dimension_numbers"]
        x, w = node.inputs
        return _Weighted(x, w, numbers.rhs_spec[0], numbers.out_spec[1])
    if node.primitive == "dot_general":
        contracted, batch = node.params["dimension_numbers"]
        x, w = node.inputs
        free = [d for d in range(w.ndim) if d not in contracted[1]]
        if len(free) == 1 and not batch[0] and contracted[0]:
            return _Weighted(x, w, free[0], node.out.ndim - 1)
    return None
