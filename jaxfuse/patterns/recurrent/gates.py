"""The gates of a cell in a scan's body, followed back to the state h:  varying + constant + h·weights;  a GRU's candidate also
has r·(...) of such a sum, or (r·h)·weights. The user's own equations make the first two parts, so a bias or a shift may stand
anywhere.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxfuse.analysis.canonical import ADD, CAST
from jaxfuse.patterns.recurrent.products import every_step
from jaxfuse.program.graph import Graph, Node, Value, evaluate
from jaxfuse.program.site import Unfit

FIXED, STEPS, STATE = range(3)


class PreProjection(NamedTuple):
    """Before its dense layer: the state ("state"), the state times the reset gate ("reset"), other values, side by side."""

    pieces: tuple[tuple[Any, int], ...]


class Columns(NamedTuple):
    """Features [begin, begin + size) of `whole`, which has them at `axis`. All gates' together are the whole again, whose
    gradient is one array; that of slices put side by side XLA makes of one padded array for each, and adds them."""

    whole: Any
    axis: int
    begin: int
    size: int

    @property
    def array(self):
        return lax.slice_in_dim(self.whole, self.begin, self.begin + self.size, axis=self.axis)


def plain(value):
    return value.array if isinstance(value, Columns) else value


class Affine(NamedTuple):
    """varying (of every step) + constant + h·weights, None for what is absent; `weights` is (hidden, features), `batch` the
    axis of the value that is the batch's. Each of the three may be `Columns` of an array. `inner` is what the reset gate
    multiplies, ("after" | "before", Affine)."""

    varying: Any = None
    constant: Any = None
    weights: Any = None
    batch: int | None = None
    inner: tuple | None = None


class Section(NamedTuple):
    """Part of a graph, to be evaluated from some of its values."""

    inputs: list[Value]
    outputs: list[Value]
    nodes: tuple = ()
    constants: tuple = ()
    constant_arrays: tuple = ()


class Loop:
    """The values of a scan's body that are known: of all steps together, or the same in each."""

    def __init__(self, body: Graph, params: dict, arrays: list):
        n_consts, n_carry = params["num_consts"], params["num_carry"]
        self.body, self.reverse, self.length = body, params["reverse"], params["length"]
        self.carried, self.initial = body.inputs[n_consts:][:n_carry], arrays[n_consts:][:n_carry]
        self.fixed = dict(zip([*body.inputs[:n_consts], *body.constants], [*arrays[:n_consts], *body.constant_arrays]))
        self.steps = dict(zip(body.inputs[n_consts + n_carry :], arrays[n_consts + n_carry :]))
        for value, after, array in zip(self.carried, body.outputs, self.initial):
            if value is after:  # carried on unchanged
                self.fixed[value] = array
        self.learn({})

    def learn(self, known: dict[Value, object]) -> None:
        self.steps |= known
        self.kinds = dict.fromkeys(self.carried, STATE) | dict.fromkeys(self.fixed, FIXED) | dict.fromkeys(self.steps, STEPS)
        for node in self.body.nodes:
            kind = max(map(self.depends, node.inputs), default=FIXED)
            self.kinds = dict.fromkeys(node.outputs, kind) | self.kinds

    def depends(self, value: Value) -> int:
        """FIXED, STEPS, or STATE: on a state that is not known yet."""
        return FIXED if value.literal is not None else self.kinds[value]

    def compute(self, values: list[Value]) -> list:
        """Arrays with all steps first."""
        fixed, steps = list(self.fixed), list(self.steps)
        section = Section([*fixed, *steps], values)
        return self.every_step(
            lambda *arrays: evaluate(section, arrays, {}), [self.fixed[v] for v in fixed], [self.steps[v] for v in steps])

    def every_step(self, function, shared: list, steps: list) -> list:
        return every_step(function, shared, steps, self.length)

    def compute_fixed(self, value: Value):
        return evaluate(Section(list(self.fixed), [value]), list(self.fixed.values()), {})[0]

    def last(self, steps):
        return steps[0 if self.reverse else -1]


class Follower:
    """Follows the gates of one cell back to its state."""

    def __init__(self, loop: Loop, state: Value, aliases: dict[Value, Value], reset: Value | None = None):
        self.loop, self.state, self.aliases, self.reset = loop, state, aliases, reset
        self.done: dict[Value, object] = {}

    def follow(self, value: Value):
        value = self.aliases.get(value, value)
        if value not in self.done:
            self.done[value] = self._follow(value)
        return self.done[value]

    def _follow(self, value: Value):
        if value is self.state:
            return PreProjection((("state", value.shape[-1]),))
        depends = self.loop.depends(value)
        if depends == FIXED:
            return Affine(constant=self.loop.compute_fixed(value), batch=0)
        if depends == STEPS:
            return self._of_steps(value)
        node = value.producer
        if node is None:
            raise Unfit(f"its gates read {value!r}, which is carried from step to step and is not its state")
        rule = getattr(self, f"_{'add' if node.primitive in ADD else node.primitive}", None)
        if rule is None:
            raise Unfit(f"{node} comes between the state and its gates")
        return rule(node, node.outputs.index(value))

    def _of_steps(self, value: Value) -> Affine:
        """It at all steps; pieces of one value by its last axis as columns of that, and what is added at every step, a bias, apart:
        the kernel adds it, and up its gradient, in float32."""
        node = value.producer
        if node is not None and node.primitive == "split" and node.params["axis"] == value.ndim - 1:
            return self._split(node, node.outputs.index(value))
        if node is not None and node.primitive in ADD:
            for bias, steps in (node.inputs, node.inputs[::-1]):
                if self.loop.depends(bias) == FIXED:
                    form = self.follow(steps)
                    added = self.loop.compute_fixed(bias)
                    return form._replace(constant=added if form.constant is None else plain(form.constant) + added)
        return Affine(varying=self.loop.compute([value])[0], batch=0)

    def _convert_element_type(self, node: Node, _):
        form, (value,) = self.follow(node.inputs[0]), node.inputs
        if isinstance(form, PreProjection) or node.out.dtype.itemsize > value.dtype.itemsize:  # the kernel's sums are float32
            return form
        return each(form, lambda a: a.astype(node.out.dtype))

    def _concatenate(self, node: Node, _):
        if node.params["dimension"] != node.out.ndim - 1:
            raise Unfit(f"{node} joins along another axis than the last")
        pieces: list[tuple] = []
        for value in node.inputs:
            moving = self.loop.depends(value) == STATE
            form = self.follow(value) if moving else PreProjection(((value, value.shape[-1]),))
            if not isinstance(form, PreProjection):
                raise Unfit(f"{node} joins what came out of a dense layer")
            pieces += form.pieces
        return PreProjection(tuple(pieces))

    def _mul(self, node: Node, _):
        for gate, value in (node.inputs, node.inputs[::-1]):
            if self.reset is not None and self._is_reset(gate):
                form = self.follow(value)
                if isinstance(form, Affine) and form.inner is None:
                    return Affine(batch=form.batch, inner=("after", form))
                if form == PreProjection((("state", self.state.shape[-1]),)):
                    return PreProjection((("reset", self.state.shape[-1]),))
        raise Unfit(f"{node} comes between the state and its gates")

    def _is_reset(self, value: Value) -> bool:
        while value is not self.reset and value.producer is not None and value.producer.primitive == CAST:
            value = value.producer.inputs[0]
        return value is self.reset

    def _add(self, node: Node, _):
        left, right = map(self.follow, node.inputs)
        if isinstance(left, PreProjection) or isinstance(right, PreProjection):
            raise Unfit(f"{node} adds to the state before its dense layer")
        if left.inner and right.inner:
            raise Unfit(f"{node} adds two products with the reset gate")
        varying, constant, weights = (
            a if b is None else b if a is None else plain(a) + plain(b) for a, b in zip(left[:3], right[:3]))
        batch = left.batch if left.weights is not None or left.inner else right.batch
        if left.weights is not None and right.weights is not None and left.batch != right.batch:
            raise Unfit(f"{node} adds values of different layouts")
        return Affine(varying, constant, weights, batch, left.inner or right.inner)

    def _dot_general(self, node: Node, _):
        sides = [self.loop.depends(v) for v in node.inputs]
        if sorted(sides) != [FIXED, STATE]:
            raise Unfit(f"{node} has weights that change from step to step")
        at = sides.index(STATE)
        (contracted, batched), rank = node.params["dimension_numbers"], self.state.ndim
        moving, weights = self.follow(node.inputs[at]), self.loop.compute_fixed(node.inputs[1 - at])
        if not isinstance(moving, PreProjection):
            raise Unfit(f"{node} is a second dense layer between the state and its gates")
        if any(batched) or contracted[at] != (rank - 1,) or weights.ndim != 2:
            raise Unfit(f"{node} is not the product of the state's last axis with one matrix")
        weights = weights if contracted[1 - at] == (0,) else weights.T
        total, begin = Affine(batch=None if rank == 1 else at and 1), 0
        for piece, size in moving.pieces:
            rows = weights[begin : begin + size]
            begin += size
            if piece == "state":
                part = dict(weights=rows)
            elif piece == "reset":
                part = dict(inner=("before", Affine(weights=rows)))
            else:
                part = self._product(piece, rows, node, at)
            for name, array in part.items():
                if name == "inner" and total.inner:
                    raise Unfit(f"{node} multiplies the reset state twice")
                here = getattr(total, name)
                total = total._replace(**{name: array if here is None else here + array})
        return total

    def _product(self, piece: Value, rows, node: Node, at: int) -> dict:
        """A part of the contraction that does not read the state."""

        def dot(rows, x):
            y = jnp.dot(x, rows, precision=node.params["precision"], preferred_element_type=node.params["preferred_element_type"])
            return y.T if at else y

        if self.loop.depends(piece) == FIXED:
            return dict(constant=dot(rows, self.loop.compute_fixed(piece)))
        (steps,) = self.loop.every_step(lambda *arrays: [dot(*arrays)], [rows], self.loop.compute([piece]))
        return dict(varying=steps)

    def _slice(self, node: Node, _):
        form, params = self._after_layer(node), node.params
        feature = _feature(form, node.out.ndim)
        strides = params["strides"] or (1,) * node.out.ndim
        begin, end, step = params["start_indices"][feature], params["limit_indices"][feature], strides[feature]
        if step == 1 and all(d == feature or n == m for d, (n, m) in enumerate(zip(node.out.shape, node.inputs[0].shape))):
            return _columns(form, node.out.ndim, begin, end - begin)
        return each(form, lambda a: self._same(node, 0, a), lambda w: w[:, begin:end:step])

    def _split(self, node: Node, position: int):
        form, sizes = self._after_layer(node), node.params["sizes"]
        if node.params["axis"] != _feature(form, node.out.ndim):
            raise Unfit(f"{node} splits the batch")
        return _columns(form, node.inputs[0].ndim, sum(sizes[:position]), sizes[position])

    def _transpose(self, node: Node, _):
        form = self._after_layer(node)
        moved = form._replace(batch=None if form.batch is None else node.params["permutation"].index(form.batch))
        return each(moved, lambda a: self._same(node, 0, a), lambda w: w)

    def _after_layer(self, node: Node) -> Affine:
        form = self.follow(node.inputs[0])
        if isinstance(form, PreProjection) or form.inner:
            raise Unfit(f"{node} comes between the state and its gates")
        return form

    def _same(self, node: Node, position: int, array):
        """The node's output for an array of the shape of its input, or with all steps before that."""
        run = lambda a: node.replay([a])[position]
        if array.ndim == 0:
            return array
        return jax.vmap(run)(array) if array.ndim > node.inputs[0].ndim else run(array)


def each(form: Affine, values, weights=None) -> Affine:
    weights = weights or values
    inner = form.inner and (form.inner[0], each(form.inner[1], values, weights))
    varying, constant, rows = (None if a is None else of(plain(a)) for a, of in zip(form[:3], (values, values, weights)))
    return Affine(varying, constant, rows, form.batch, inner)


def _columns(form: Affine, rank: int, begin: int, size: int) -> Affine:
    axis = _feature(form, rank) - rank

    def of(array):
        return array if array.ndim == 0 else Columns(array, axis, begin, size)

    return each(form, of, lambda w: Columns(w, -1, begin, size))


def whole(parts: list, axis: int):
    """What the parts make side by side along the axis, if they are all columns of one array, in their order; else None."""
    first = parts[0]
    if not all(isinstance(part, Columns) and part.whole is first.whole and part.axis == axis for part in parts):
        return None
    begins = [sum(part.size for part in parts[:i]) for i in range(len(parts) + 1)]
    return first.whole if [part.begin for part in parts] == begins[:-1] and first.whole.shape[axis] == begins[-1] else None


def _feature(form: Affine, rank: int) -> int:
    if rank == 1:
        return 0
    assert form.batch is not None, "of two axes one is the batch's"
    return 1 - form.batch
