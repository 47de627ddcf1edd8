"""Where a program computes the gradient of some of its nodes: JAX is asked what that gradient is, and its values are looked for.

The gradient is linear in the cotangent dy. So each of its values is a sum of paths, a path being dy taken through linear
steps one after the other: products with values of the forward pass, sums over axes, broadcasts. As sums of paths two programs
are compared whatever the order of their additions, and whichever equal nodes of the forward pass were merged.
"""

import collections
import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.analysis.normal import ADD, CAST, constant
from jaxfuse.analysis.regions import cone
from jaxfuse.program.equations import key_of
from jaxfuse.program.graph import Graph, Node, Value, compute
from jaxfuse.runtime import private

CONTRACTIONS = ("dot_general", "conv_general_dilated")
UNARY = (*RESHAPES, "transpose", "reduce_sum", CAST)
Form = collections.Counter  # path -> how often; path 0 is dy itself
MOST_NODES = 64  # between a value and its inputs


class Gradient(NamedTuple):
    """`found[i]` is the value that is the gradient of the i-th input plus the sum of `added[i]`, or None."""

    dy: Value
    found: list[Value | None]
    added: list[tuple[Value, ...]]

    @property
    def defines(self) -> tuple[Value, ...]:
        return tuple(value for value in self.found if value is not None)


def gradients(graph: Graph, inputs: list[Value], end: Value, backward: frozenset[int], fixed: Iterable[Value] = ()) -> list[Gradient]:
    """For every cotangent of `end` that the program has: where in its backward pass the gradients of `inputs` are, through the
    nodes that compute `end` from them and from what is `fixed`. None where it needs more than these."""
    given = {*inputs, *fixed}
    nodes = cone([end], lambda value: value not in given, MOST_NODES)
    needed = [v for v in (end, *[v for n in nodes for v in n.inputs]) if v.producer is None and v.literal is None and v not in given]
    if needed or len(nodes) > MOST_NODES:
        return []
    constants = dict.fromkeys(v for n in nodes for v in n.inputs if v.producer is not None and constant(v) is not None)
    numbers = [*fixed, *constants]
    nodes = [n for n in nodes if n.out not in numbers]
    return _found(graph, _traced(nodes, inputs, numbers, end), [*inputs, *numbers], end, backward)


def gradients_of(graph: Graph, node: Node, backward: frozenset[int]) -> list[Gradient]:
    """The same for the operands of one node: a value that it reads twice, as x·xᵀ does, has two gradients."""
    apart = [Value(v.aval) for v in node.inputs]
    alone = node.with_inputs(apart)
    return _found(graph, _traced([alone], apart, [], alone.out), node.inputs, node.out, backward)


def _found(graph: Graph, traced: Graph | None, inputs: list[Value], end: Value, backward: frozenset[int]) -> list[Gradient]:
    """Where the program computes what JAX's gradient of `end` does."""
    return [] if traced is None else _Target(graph, traced, inputs).gradients(end, backward)


class _Target:
    """What is looked for: the forms of the gradients, as the traced gradient computes them from the graph's own values. A path is a
    number, known by its last step and the path before it."""

    def __init__(self, graph: Graph, traced: Graph, inputs: list[Value]):
        self._numbers: dict[tuple, int] = {}
        self._is_complete = False
        self._firsts: list[tuple[str, Value]] = []  # what combines dy with another value of the program
        own: dict[Value, Value | Form | None] = dict(zip(traced.inputs, (Form({0: 1}), *inputs)))
        unary = {0}  # paths without other operands than numbers

        def read(value: Value):
            return value if value.literal is not None else own.get(value)

        for node in traced.nodes:
            operands = [read(v) for v in node.inputs]
            forms = [v for v in operands if isinstance(v, Form)]
            if not forms:
                known = graph.known(node.eqn, operands) if None not in operands else None
                own |= zip(node.outputs, known.outputs if known else [None] * len(node.outputs))
                continue
            own[node.out] = made = self._step(node, operands) if None not in operands else None
            if made and len(forms[0]) == 1 and unary >= set(forms[0]):
                contracts = node.primitive in CONTRACTIONS
                others = [v for v in operands if isinstance(v, Value) and (contracts or constant(v) is None)]
                self._firsts += [(node.primitive, v) for v in others]
                if not others and len(forms) == 1:
                    unary |= set(made)
        self._is_complete = True
        self._forms = [form if isinstance(form := read(v), Form) else None for v in traced.outputs]

    def gradients(self, end: Value, backward: frozenset[int]) -> list[Gradient]:
        found: dict[Value, None] = {}
        for primitive, other in self._firsts:
            for node in other.users:
                if node.index in backward and node.primitive == primitive:
                    found |= dict.fromkeys(v for value in node.inputs if value is not other for v in _before_unary(value))
        return [self._search(dy, backward) for dy in found if (dy.shape, dy.dtype) == (end.shape, end.dtype)]

    def _search(self, dy: Value, backward: frozenset[int]) -> Gradient:
        """Goes forward from dy along the paths of the gradients."""
        forms: dict[Value, Form] = {dy: Form({0: 1})}
        added: dict[Value, tuple[Value, ...]] = {dy: ()}
        gradient = Gradient(dy, [None] * len(self._forms), [()] * len(self._forms))
        pending = {n.index: n for n in dy.users}
        heap = sorted(pending)
        while heap:
            node = pending[heapq.heappop(heap)]
            if node.index not in backward or len(node.outputs) != 1:
                continue
            form, rest = _sum(node, forms, added) if node.primitive in ADD else (None, ())
            if form is None and not any(added.get(v) for v in node.inputs):
                form = self._step(node, [forms.get(v, v) for v in node.inputs])
            if form is None:
                continue
            forms[node.out], added[node.out] = form, rest
            for i, wanted in enumerate(self._forms):
                left = _combined(form, wanted, -1) if wanted and gradient.found[i] is None else None
                if left in ({}, {0: 1}):  # dy itself may be added too, as by a skip connection
                    gradient.found[i], gradient.added[i] = node.out, (*rest, *[dy] * len(left))
            for user in node.out.users:
                if user.index not in pending:
                    pending[user.index] = user
                    heapq.heappush(heap, user.index)
        return gradient

    def _step(self, node: Node, operands: list) -> Form | None:
        """The form of what a linear node computes of its operands, forms and values; None if it is not one that is looked at."""
        name, linear = node.primitive, [i for i, v in enumerate(operands) if isinstance(v, Form)]
        if name in (*ADD, "sub") and len(linear) == 2:
            return _combined(operands[0], operands[1], -1 if name == "sub" else 1)
        if len(linear) != 1:
            return None
        position, others = linear[0], [v for v in operands if isinstance(v, Value)]
        form, known = operands[position], tuple(others if name in CONTRACTIONS else map(_token, others))
        if name == "neg":
            return _combined(Form(), form, -1)
        if name == "mul" or name == "div" and position == 0:
            return self._after(form, (name, *known))
        if name == "select_n" and position > 0 and all(constant(v) == 0 for v in others[1:]):
            return self._after(form, (name, position, known[0]))
        if name in CONTRACTIONS or name in UNARY and not others:
            return self._after(form, (name, position, *known, *_plain_params(node)))
        return None

    def _after(self, form: Form, step: tuple) -> Form | None:
        """The form after one more step; None if that is on no path that is looked for."""
        after: Form = Form()
        for path, times in form.items():
            if self._is_complete and (step, path) not in self._numbers:
                return None
            after[self._numbers.setdefault((step, path), len(self._numbers) + 1)] += times
        return after


def _before_unary(value: Value) -> Iterator[Value]:
    """The value, and what unary steps and products with numbers have made it of."""
    yield value
    while (node := value.producer) is not None and node.primitive in (*UNARY, "mul", "div"):
        operands = [v for v in node.inputs if constant(v) is None]
        if len(operands) != 1:
            return
        (value,) = operands
        yield value


def _sum(node: Node, forms: dict[Value, Form], added: dict[Value, tuple[Value, ...]]) -> tuple[Form, tuple[Value, ...]]:
    """An addition, also of what is not of this gradient: another gradient of the same value."""
    form: Form = Form()
    rest: tuple[Value, ...] = ()
    for value in node.inputs:
        form = _combined(form, forms.get(value, Form()), 1)
        rest = (*rest, *(added[value] if value in forms else (value,)))
    return form, rest


def _combined(left: Form, right: Form, sign: int) -> Form:
    """Without what cancels; a Counter's own sum drops what is negative."""
    total = Form(left)
    for path, times in right.items():
        total[path] += sign * times
    return Form({path: times for path, times in total.items() if times})


class Sums:
    """Which values of a graph are the same but for the order in which things are added on the way."""

    def __init__(self, graph: Graph):
        self._firsts: dict[Value, Value] = {}  # the first value that is the same; itself where there is none before it
        self._addends: dict[Value, Form] = {}
        seen: dict = {}
        for node in graph.nodes:
            inputs = [self._firsts.get(v, v) for v in node.inputs]
            if node.primitive in ADD and all(v.literal is None for v in inputs):
                self._addends[node.out] = addends = sum(map(self.addends, inputs), Form())
                key = frozenset(addends.items())
            else:
                key = key_of(node.eqn, inputs)
            first = node if key is None or node.eqn.effects else seen.setdefault(key, node)
            self._firsts |= zip(node.outputs, first.outputs)

    def addends(self, value: Value) -> Form:
        """value -> how often it is added: what the value is the sum of, the value itself where it is none."""
        first = self._firsts.get(value, value)
        return self._addends.get(first, Form({first: 1}))


def _token(value: Value):
    number = constant(value)
    return value if number is None else ("number", number)


def _plain_params(node: Node) -> list[tuple[str, str]]:
    """Parameters as something that can be compared: axes may be NumPy's integers."""

    def plain(param):
        return tuple(map(plain, param)) if isinstance(param, tuple) else int(param) if hasattr(param, "__index__") else param

    return sorted((key, str(plain(value))) for key, value in node.params.items())


# --- asking JAX --------------------------------------------------------------------------------------------------

_gradients: dict[tuple, Graph | None] = {}


def _traced(nodes: list[Node], inputs: list[Value], numbers: list[Value], end: Value) -> Graph | None:
    """JAX's gradient of `end` as a program of dy, the inputs and the numbers; the same for all sites that read alike. None where JAX has
    none, and so the program neither: on explicit axes, where types do not tell how a filter's gradient is sharded."""
    given = [*inputs, *numbers]
    names = {v: i for i, v in enumerate(given)}
    text: list = [len(inputs), *[(v.aval.str_short(), str(v.aval.sharding)) for v in (*given, end)]]
    for node in nodes:
        wiring = [(str(v.literal), str(v.dtype)) if v.literal is not None else names[v] for v in node.inputs]
        names |= {v: len(names) + i for i, v in enumerate(node.outputs)}
        text.append((node.primitive, str(wiring), str(node.params)))
    key = (*text, names[end])

    def value(*arrays):
        return compute([end], dict(zip(given, arrays)), {})[0]

    if key not in _gradients:
        if len(_gradients) > 256:
            _gradients.clear()

        def gradient(dy, *arrays):
            fixed = arrays[len(inputs) :]
            return jax.vjp(lambda *differentiated: value(*differentiated, *fixed), *arrays[: len(inputs)])[1](dy)

        try:
            _gradients[key] = Graph(jax.make_jaxpr(gradient)(end.aval, *[v.aval for v in given]))
        except private.ShardingTypeError:
            _gradients[key] = None
    return _gradients[key]
