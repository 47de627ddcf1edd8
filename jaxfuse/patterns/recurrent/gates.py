"""The gates of a cell in a scan's body, followed back to the state h: sums of columns of arrays.

    varying + constant + h·weights    of a GRU's candidate also  r·(h·weights + constant)  or  (r·h)·weights

The user's own equations make the first two, so a bias or a shift may stand anywhere.
"""

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxfuse.analysis.normal import ADD, CAST, is_float_cast, uncast
from jaxfuse.ops.columns import Columns
from jaxfuse.ops.over_time import over_time
from jaxfuse.patterns.recurrent.cell import Cell, Gate
from jaxfuse.program.graph import Graph, Node, Value, compute
from jaxfuse.program.site import Unfit
from jaxfuse.scan_pairs import Loop

MOVES = ("slice", "split", "transpose", CAST)
Moves = tuple[tuple[Node, int], ...]  # nodes, each with the place of the output that is meant


class Depends(enum.IntEnum):
    """What a value of a loop's body changes with: nothing, the step, or a state that is not known yet."""

    FIXED = 0
    STEPS = 1
    STATE = 2


class Steps:
    """The values of a scan's body that are known: of all steps together, or the same in each."""

    def __init__(self, loop: Loop, body: Graph, arrays: list):
        self.body, self.reverse, self.length = body, loop.options["reverse"], loop.options["length"]
        consts, self.carried, xs = loop.split(body.inputs)
        of_consts, self.initial, of_xs = loop.split(arrays)
        self.fixed = dict(zip([*consts, *body.constants], [*of_consts, *body.constant_arrays]))
        self.fixed |= {v: array for v, after, array in zip(self.carried, body.outputs, self.initial) if v is after}
        self.known: dict[Value, Any] = {}
        self.learn(dict(zip(xs, of_xs)))

    def learn(self, known: dict[Value, Any]) -> None:
        """Values at all steps."""
        self.known |= known
        kinds = dict.fromkeys(self.carried, Depends.STATE) | dict.fromkeys(self.fixed, Depends.FIXED)
        self._kinds = kinds | dict.fromkeys(self.known, Depends.STEPS)
        for node in self.body.nodes:
            kind = max(map(self.depends, node.inputs), default=Depends.FIXED)
            self._kinds = dict.fromkeys(node.outputs, kind) | self._kinds

    def depends(self, value: Value) -> Depends:
        return Depends.FIXED if value.literal is not None else self._kinds[value]

    def compute(self, values: list[Value]) -> list:
        """Arrays with all steps first."""
        def of_step(*arrays):
            return compute(values, dict(zip([*self.fixed, *self.known], arrays)), {})

        return over_time(of_step, list(self.fixed.values()), list(self.known.values()), self.length)

    def compute_fixed(self, value: Value):
        return compute([value], dict(self.fixed), {})[0]


@dataclasses.dataclass
class Sum:
    """What is added up to a gate. `reset` is what the reset gate multiplies; with `resets_state` it multiplies h before its product."""

    varying: list[Columns] = dataclasses.field(default_factory=list)  # of all steps
    constant: list[Columns] = dataclasses.field(default_factory=list)
    weights: list[Columns] = dataclasses.field(default_factory=list)  # (hidden, features)
    reset: "Sum | None" = None
    resets_state: bool = False

    @property
    def parts(self) -> tuple[list[Columns], ...]:
        """All of them, with what the reset gate multiplies."""
        return self.varying, self.constant, self.weights, *(self.reset.parts if self.reset else ())

    def negated(self) -> "Sum":
        varying, constant, weights = ([part._replace(negative=True) for part in parts] for parts in self.parts[:3])
        return Sum(varying, constant, weights, self.reset, self.resets_state)


class Follower:
    """Follows the gates of one cell back to its state. Raises `Unfit` where that is not how they are computed."""

    def __init__(self, steps: Steps, cell: Cell, state: Value):
        self.steps, self.state = steps, state
        self.reset = None if cell.is_lstm else uncast(cell.gates[0].value)
        self._arrays: dict[Value, Any] = {}
        self._products: dict[Node, Sum] = {}

    def follow(self, gate: Gate) -> Sum:
        total = Sum()
        self._add(total, gate.value, (), gate)
        return total

    def _add(self, total: Sum, value: Value, moves: Moves, gate: Gate | None = None) -> None:
        """Adds what the moves make of the value. `gate`: its function is still to be passed."""
        if gate is not None and value is gate.end:
            value = gate.start
        node, depends = value.producer, self.steps.depends(value)
        if depends is Depends.FIXED:
            total.constant.append(self._columns(value, moves))
        elif node is not None and self._is_sum(node, depends):
            for addend in node.inputs:
                self._add(total, addend, moves)
        elif depends is Depends.STEPS and not _is_piece(value):
            total.varying.append(self._columns(value, moves))
        elif node is None:
            raise Unfit("a gate reads the state without a dense layer" if value is self.state else
                        f"its gates read {value!r}, which is carried from step to step and is not its state")
        elif node.primitive in MOVES and (node.primitive != CAST or is_float_cast(node)):
            self._add(total, node.inputs[0], ((node, node.outputs.index(value)), *moves), gate)
        elif node.primitive == "mul":
            self._add_reset(total, node, moves)
        elif node.primitive == "dot_general":
            self._add_product(total, node, moves)
        else:
            raise Unfit(f"{node} comes between the state and its gates")

    def _is_sum(self, node: Node, depends: Depends) -> bool:
        """Of which each addend is looked at. What is added at every step, a bias, is kept apart: the kernel adds it, and up its
        gradient, in float32."""
        return node.primitive in ADD and (depends is Depends.STATE or Depends.FIXED in map(self.steps.depends, node.inputs))

    def _columns(self, value: Value, moves: Moves) -> Columns:
        if value not in self._arrays:
            is_fixed = self.steps.depends(value) is Depends.FIXED
            self._arrays[value] = self.steps.compute_fixed(value) if is_fixed else self.steps.compute([value])[0]
        return Columns(self._arrays[value], *_features(moves, value.shape), _casts(moves))

    def _add_reset(self, total: Sum, node: Node, moves: Moves) -> None:
        for gate, value in (node.inputs, node.inputs[::-1]):
            if self._is_reset(gate) and total.reset is None and all(move.primitive == CAST for move, _ in moves):
                total.reset = Sum()
                self._add(total.reset, value, moves)
                return
        raise Unfit(f"{node} comes between the state and its gates")

    def _is_reset(self, value: Value) -> bool:
        return self.reset is not None and uncast(value) is self.reset

    def _add_product(self, total: Sum, node: Node, moves: Moves) -> None:
        sides = [self.steps.depends(v) for v in node.inputs]
        if sorted(sides) != [Depends.FIXED, Depends.STATE]:
            raise Unfit(f"{node} has weights that change from step to step")
        at = sides.index(Depends.STATE)
        if node not in self._products:
            self._products[node] = self._product(node, at)
        (axis, features), casts, of_all = _features(moves, node.out.shape), _casts(moves), self._products[node]
        if axis != (-2 if at and node.out.ndim > 1 else -1):
            raise Unfit(f"{node} has the features of a gate along another axis than the state")
        if total.reset and of_all.reset:
            raise Unfit(f"{node} multiplies the reset state twice")
        if of_all.reset:
            total.reset, total.resets_state = Sum(), True
        for mine, made in zip(total.parts, of_all.parts):
            mine += [Columns(part.array, part.axis, features, casts) for part in made]

    def _product(self, node: Node, at: int) -> Sum:
        """All columns: the weights of the state, and the products of what is beside it."""
        contracted, batched = node.params["dimension_numbers"]
        weights = self.steps.compute_fixed(node.inputs[1 - at])
        if any(batched) or contracted[at] != (self.state.ndim - 1,) or weights.ndim != 2:
            raise Unfit(f"{node} is not the product of the state's last axis with one matrix")
        weights, begin, total = weights if contracted[1 - at] == (0,) else weights.T, 0, Sum()

        def product(rows, x):
            y = jnp.dot(x, rows, precision=node.params["precision"], preferred_element_type=node.params["preferred_element_type"])
            return Columns(y.T, -2, None) if at and y.ndim > 1 else Columns(y, -1, None)

        for value in self._side_by_side(node.inputs[at]):
            size, depends = value.shape[-1], self.steps.depends(value)
            rows, begin = weights if size == len(weights) else weights[begin : begin + size], begin + size
            if value is self.state:
                total.weights.append(Columns(rows, -1, None))
            elif depends is Depends.STATE:
                total.reset = Sum(weights=[*(total.reset.weights if total.reset else []), Columns(rows, -1, None)])
            elif depends is Depends.FIXED:
                total.constant.append(product(rows, self.steps.compute_fixed(value)))
            else:
                of_steps = self.steps.compute([value])
                (made,) = over_time(lambda rows, x: [product(rows, x).array], [rows], of_steps, self.steps.length)
                total.varying.append(Columns(made, -2 if at and node.out.ndim > 1 else -1, None))
        return total

    def _side_by_side(self, value: Value) -> Iterator[Value]:
        """What goes into a dense layer of the state: the state, the state times the reset gate, values that do not depend on it."""
        value = uncast(value) if self.steps.depends(value) is Depends.STATE else value
        node = value.producer
        if value is self.state or self.steps.depends(value) is not Depends.STATE or self._is_reset_state(node):
            yield value
        elif node is not None and node.primitive == "concatenate" and node.params["dimension"] == value.ndim - 1:
            for piece in node.inputs:
                yield from self._side_by_side(piece)
        else:
            self._add(Sum(), value, ())  # it says what is wrong, if something is
            raise Unfit(f"{node} comes between the state and its dense layer")

    def _is_reset_state(self, node: Node | None) -> bool:
        return node is not None and node.primitive == "mul" and any(
            self._is_reset(gate) and uncast(other) is self.state for gate, other in (node.inputs, node.inputs[::-1]))


def _is_piece(value: Value) -> bool:
    """Of one value by its last axis."""
    node = value.producer
    return node is not None and node.primitive == "split" and node.params["axis"] == value.ndim - 1


def _features(moves: Moves, shape: tuple[int, ...]) -> tuple[int, range | None]:
    """(the axis of a value of this shape that the moves make the last one, which of its places they leave)."""
    if not shape:
        return -1, None
    axis = len(shape) - 1
    for node, _ in reversed(moves):
        axis = int(node.params["permutation"][axis]) if node.primitive == "transpose" else axis
    first, features = axis - len(shape), range(shape[axis])
    for node, position in moves:
        params = node.params
        if node.primitive == "transpose":
            axis = list(params["permutation"]).index(axis)
        elif node.primitive == "split" and params["axis"] == axis:
            begin = sum(params["sizes"][:position])
            features = features[begin : begin + params["sizes"][position]]
        elif node.primitive == "slice" and all(d == axis or n == m for d, (n, m) in enumerate(zip(node.out.shape, node.inputs[0].shape))):
            step = params["strides"][axis] if params["strides"] else 1
            features = features[params["start_indices"][axis] : params["limit_indices"][axis] : step]
        elif node.primitive != CAST:
            raise Unfit(f"{node} takes a part of the batch")
    return first, features


def _casts(moves: Moves) -> tuple:
    """Those that lose something: the kernel's sums are float32."""
    casts = (node for node, _ in moves if node.primitive == CAST)
    return tuple(node.out.dtype for node in casts if node.out.dtype.itemsize <= node.inputs[0].dtype.itemsize)
