"""The traced program as a graph: values with their producer and users, nested `jit`s inlined, equal nodes merged.

Knows nothing of any op. A `Node` is one equation of the program and can be replayed as it was, with its name stack and
its custom derivative rules; a `Value` is what flows between nodes.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from jaxfuse.program.equations import CUSTOM_DERIVATIVE_CALLS, inlinable, key_of, same_rule, without_donation
from jaxfuse.program.source import user_line
from jaxfuse.runtime.private import is_symbolic, name_of, params_of


class Value:
    """An array of the program. `literal` is its value if it is a constant written into the program."""

    __slots__ = ("aval", "producer", "users", "literal")

    def __init__(self, aval, producer: "Node | None" = None, literal=None):
        self.aval, self.producer, self.literal = aval, producer, literal
        self.users: list[Node] = []

    shape = property(lambda self: self.aval.shape)
    dtype = property(lambda self: self.aval.dtype)
    ndim = property(lambda self: len(self.aval.shape))

    @property
    def node(self) -> "Node":
        """The producer of a value that is known to be computed in the program."""
        assert self.producer is not None, f"{self!r} is given to the program"
        return self.producer

    @property
    def index(self) -> int:
        """That of its producer, or -1: values in program order."""
        return self.producer.index if self.producer else -1

    @property
    def spec(self) -> tuple:
        """The mesh axes that each dimension is divided over, where the type says so."""
        sharding = getattr(self.aval, "sharding", None)
        return tuple(sharding.spec.update(unreduced=frozenset(), reduced=frozenset())) if sharding else ()

    @property
    def is_partial(self) -> bool:
        """Whether a sum over mesh axes is still to be taken, of it or of its gradient."""
        spec = getattr(getattr(self.aval, "sharding", None), "spec", None)
        return spec is not None and bool(spec.unreduced or spec.reduced)

    def __repr__(self):
        return f"{self.dtype}{list(self.shape)}"


class Transposed(Value):
    """The value `of` with its axes in another order, for fused ops to define and read: no node of the program computes it."""

    __slots__ = ("of",)

    def __init__(self, of: Value, producer: "Node"):
        super().__init__(producer.out.aval, producer)
        self.of, producer.outputs = of, [self]


class Node:
    """One equation: `primitive` by name, its parameters, its inputs and outputs as Values."""

    __slots__ = ("eqn", "primitive", "params", "index", "inputs", "outputs", "name_stack", "callers")

    def __init__(self, eqn, index: int, inputs: list[Value], name_stack, callers=()):
        self.eqn, self.index, self.inputs, self.name_stack = eqn, index, inputs, name_stack
        self.primitive, self.params = name_of(eqn), params_of(eqn)
        self.callers = callers  # the equations of the inlined jits that this one stood in, innermost first
        self.outputs = [Value(v.aval, self) for v in eqn.outvars]
        for value in dict.fromkeys(inputs):
            value.users.append(self)

    @property
    def out(self) -> Value:
        return self.outputs[0]

    def other_input(self, value: Value) -> Value:
        """Of two inputs the one that is not this value; the value itself where both are."""
        return self.inputs[self.inputs[0] is value]

    def with_inputs(self, values: list[Value]) -> "Node":
        """The same equation of other values."""
        return Node(self.eqn, self.index, values, self.name_stack, self.callers)

    def replay(self, values: list) -> list:
        """The equation's outputs for these inputs: bound as it was traced, under the same mesh."""
        with self.eqn.ctx.manager:
            return self.bind(values)

    def bind(self, values: list) -> list:
        """The equation's outputs for these inputs, under the mesh of the caller."""
        eqn = self.eqn
        name_stack = source_info_util.current_name_stack() + self.name_stack + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack):
            outputs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(without_donation(eqn.params)))
        return outputs if eqn.primitive.multiple_results else [outputs]

    def source(self) -> str:
        """file:line of the user's code that made this equation."""
        return user_line([eqn.source_info.traceback for eqn in (self.eqn, *self.callers)])

    def scope(self) -> str:
        """The `jax.named_scope`s, and transformations, that it was traced under; Flax linen names modules so."""
        return str(self.name_stack + self.eqn.source_info.name_stack)

    def __str__(self):
        return f"{self.primitive} at {self.source()}"


class Marks:
    """What matching has made of a graph so far. The graph itself reads none of it: each is written in one place."""

    def __init__(self):
        self.replaced: set[Value] = set()  # what a match computes instead of their producers: liveness.accept
        self.fused_away: set[int] = set()  # indices of nodes that nobody needs any more: liveness.accept
        self.revived: set[int] = set()  # of nodes that only a match needs: liveness.accept
        self.parts: Any = None  # forward and backward, once they are told apart: autodiff
        self.transposes: dict[tuple[Value, tuple[int, ...]], Transposed] = {}  # layout.transposed


class Graph:
    """nodes in program order; inputs and outputs of the program; constants the program closes over.

    `outer` is (graph, node) for the body of a loop or branch: the node whose body this is, and the graph it stands in.
    """

    def __init__(self, closed: ClosedJaxpr, outer: "tuple[Graph, Node] | None" = None):
        self.outer = outer
        self.nodes: list[Node] = []
        self.marks = Marks()
        self._seen: dict = {}
        self.inputs = [Value(v.aval) for v in closed.jaxpr.invars]
        self.constants: list[Value] = []
        self.constant_arrays: list = []
        self.outputs = self._inline(closed, self.inputs, source_info_util.new_name_stack())
        self.returned = frozenset(self.outputs)

    def is_returned(self, value: Value) -> bool:
        return value in self.returned

    def original(self, value: Value) -> Value:
        """The value itself; of a part of the graph, what its copy stands for."""
        return value

    def node_in_subgraph(self, node: Node) -> "Node | None":
        """The node itself; of a part of the graph, the part's node for it, if it has one."""
        return node

    @functools.cached_property
    def initially_dead(self) -> frozenset[int]:
        """Indices of the nodes that nobody needs in the program as it was traced."""
        needed: set[int] = set()
        for node in reversed(self.nodes):
            if node.eqn.effects or any(self.is_returned(v) or any(n.index in needed for n in v.users) for v in node.outputs):
                needed.add(node.index)
        return frozenset(range(len(self.nodes))) - needed

    @functools.cached_property
    def is_symbolic(self) -> bool:
        """Whether a value has no fixed shape, as `jax.export` traces them."""
        return is_symbolic([v.aval for node in self.nodes for v in (*node.inputs, *node.outputs)])

    def _read(self, environment, atom) -> Value:
        return Value(atom.aval, literal=atom.val) if isinstance(atom, Literal) else environment[atom]

    def _inline(self, closed: ClosedJaxpr, inputs: list[Value], name_stack, callers=()) -> list[Value]:
        """Adds the nodes of a program of these inputs, and what it closes over; gives its outputs."""
        jaxpr, constants = closed.jaxpr, [Value(v.aval) for v in closed.jaxpr.constvars]
        self.constants += constants
        self.constant_arrays += closed.consts
        environment = dict(zip(jaxpr.constvars, constants)) | dict(zip(jaxpr.invars, inputs))
        for eqn in jaxpr.eqns:
            operands = [self._read(environment, v) for v in eqn.invars]
            inner = inlinable(eqn)
            if inner is not None:
                outputs = self._inline(inner, operands, name_stack + eqn.source_info.name_stack, (eqn, *callers))
            else:
                outputs = self._node(eqn, operands, name_stack, callers).outputs
            environment.update(zip(eqn.outvars, outputs))
        return [self._read(environment, v) for v in jaxpr.outvars]

    def _node(self, eqn, inputs, name_stack, callers) -> Node:
        """A node for the equation, or the node that already computes the same."""
        if known := self.known(eqn, inputs):
            return known
        node = Node(eqn, len(self.nodes), inputs, name_stack, callers)
        self.nodes.append(node)
        if not eqn.effects and (key := key_of(eqn, inputs)) is not None:
            self._seen[key] = node
        return node

    def known(self, eqn, inputs: list[Value]) -> Node | None:
        """The node that computes this equation of these values."""
        known = None if eqn.effects else self._seen.get(key_of(eqn, inputs))
        return known if known is None or known.primitive not in CUSTOM_DERIVATIVE_CALLS or same_rule(known.eqn, eqn) else None


class Emission(NamedTuple):
    """What replaces the producers of the values it `defines`: `run(read)` yields (value, array) for each of them once all
    `needs` can be read."""

    needs: tuple[Value, ...]
    defines: tuple[Value, ...]
    run: Callable[[Callable[[Value], object]], Iterable[tuple[Value, object]]]

    @classmethod
    def of(cls, needs: Iterable[Value], defines: Iterable[Value], function: Callable[..., Iterable]) -> "Emission":
        """What a function gives of the arrays of the needs."""
        needs, defines = tuple(needs), tuple(defines)
        return cls(needs, defines, lambda read: zip(defines, function(*map(read, needs)), strict=True))

    def context(self):
        """What it runs in: the mesh, and what else JAX keeps of where an equation was traced, of a node that it replaces."""
        return next((v.producer.eqn.ctx.manager for v in self.defines if v.producer), contextlib.nullcontext())


def evaluate(graph, arguments: Sequence, replacements: dict[Value, Emission], replay=Node.replay) -> list:
    """The outputs of a graph, or of a part of one, for `arguments`; `replacements` maps a value to what computes it instead of `replay`.

    Nodes that nobody needs any more are left out; nodes with effects stay, in their order.
    """
    environment = dict(zip([*graph.inputs, *graph.constants], [*arguments, *graph.constant_arrays]))
    for node in graph.nodes:
        if node.eqn.effects:
            inputs = compute(node.inputs, environment, replacements, replay)
            if node.outputs:
                compute(node.outputs, environment, replacements, replay)
            else:
                replay(node, inputs)
    return compute(graph.outputs, environment, replacements, replay)


def compute(wanted: Sequence[Value], environment: dict[Value, Any], replacements: dict[Value, Emission], replay=Node.replay) -> list:
    """The wanted values, computed on demand from those in `environment`, and put there.

    Depth-first, without recursion: a program may be thousands of equations deep."""

    def read(value: Value):
        return value.literal if value.literal is not None else environment[value]

    def steps(value: Value) -> Iterator[Value]:
        """Yields the values needed first, then computes `value`."""
        if emission := replacements.get(value):
            yield from emission.needs
            with emission.context():
                environment.update(emission.run(read))
        else:
            node = value.node
            yield from node.inputs
            environment.update(zip(node.outputs, replay(node, [read(v) for v in node.inputs])))

    stack: list[tuple[Value, Iterator[Value] | None]] = [(value, None) for value in wanted]
    while stack:
        value, running = stack.pop()
        if value.literal is not None or value in environment:
            continue
        running = running or steps(value)
        needed = next(running, None)
        if needed is not None:
            stack += [(value, running), (needed, None)]
    return [read(value) for value in wanted]
