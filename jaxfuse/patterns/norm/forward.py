"""Layer, RMS, group and instance norm: statistics of each row, each group of channels, each channel of each example.

From a sum of squares the walk goes forward over what is computed of the statistics alone (broadcasts, epsilon, gamma and beta
multiplied in) and over what is done to x with it. Where that ends, the norm ends. form.py reads off what it computes, site.py
makes a Match of it.
"""

import dataclasses
import functools

from jaxfuse.analysis.axes import IndexMap
from jaxfuse.analysis.canonical import ADD, CAST, constant, is_float_cast, size, varying_axes
from jaxfuse.analysis.layout import RESHAPES, Layout
from jaxfuse.analysis.statistics import Statistics, narrowest, square
from jaxfuse.patterns.dense.site import is_parameter
from jaxfuse.patterns.norm.site import add_before, fused
from jaxfuse.patterns.walk import depends_on
from jaxfuse.program.autodiff import forward
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.site import Refusal

SHAPED = (*RESHAPES, "transpose", CAST)
ARITHMETIC = (*ADD, "sub", "mul", "div", "neg", "max", "sqrt", "rsqrt", "square", "integer_pow", "pow", "select_n", "stop_gradient")
LARGEST = 64  # nodes of one norm


def anchors(graph):
    """Sums over some axes of the squares of a value, or of a value less its mean."""
    return [n for n in forward(graph).nodes if n.primitive == "reduce_sum" and _normalised(n) is not None]


def _normalised(node: Node) -> Value | None:
    """What the sum of squares `node` is a statistic of."""
    found = square(node.inputs[0])
    if found is None or found.masked:
        return None
    return found.minuend if found.is_deviation else found.base


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields a Match or a Refusal if the sum of squares is made into a normalisation of rows."""
    x = _normalised(node)
    if x is None:
        return
    kept = [d for d in range(x.ndim) if d not in node.params["axes"]]
    if node.index in claimed or len(kept) == 1 and kept != [0]:  # the latter is batch_norm's
        return
    part = forward(graph)
    norm = _Norm(part, node, x)
    if norm.end is None or not (norm.centered or norm.has_mean()) or any(n.index in claimed for n in norm.nodes):
        return
    name, reason = _name(norm, norm.end, tuple(node.params["axes"]), kept)
    reason = reason or norm.stop_gradient_reason() or norm.read_elsewhere(part) or norm.mismatch
    if reason:
        before = add_before(part, x, claimed)
        unfused = norm.unfused if norm.mismatch == reason else ""
        nodes = (*([before] if before else []), *norm.nodes)
        yield Refusal(f"{'add+' * (before is not None)}{name}{unfused}", node, (x,), reason, nodes=nodes)
        return
    yield from fused(graph, part, node, norm, name, claimed, unprofitable)


def _name(norm: "_Norm", end: Value, axes: tuple[int, ...], kept: list[int]) -> tuple[str, str]:
    """(name, what is wrong with the axes)."""
    x, last = norm.x, norm.x.ndim - 1
    trailing = tuple(sorted(axes)) == tuple(range(len(kept), x.ndim))
    if _regrouped(x, axes, end):
        return "group_norm", ""
    if 0 not in axes and x.ndim > 2 and (kept == [0, last] or trailing and len(axes) > 1 and norm.scaled_along(kept)):
        return "instance_norm", ""
    if trailing:
        return "layer_norm" if norm.centered else "rms_norm", ""
    reason = f"statistics over axes {tuple(sorted(map(int, axes)))} of {x!r}: a layer norm is over the last axes"
    return "norm", reason


def _regrouped(x: Value, axes: tuple[int, ...], end: Value) -> bool:
    """Whether x is another array with its channels split into groups, normalised over more than the channels of one place,
    or to be put together again."""
    node = narrowest(x).producer
    if node is None or node.primitive != "reshape":
        return False
    source = node.inputs[0]
    split = x.shape[-1] != source.shape[-1]
    return len(axes) > 1 and (split or x.ndim > source.ndim) or split and end.shape != x.shape


@dataclasses.dataclass(frozen=True)
class _Step:
    """How far a full-size value is on its way from x to the normalised value."""

    centered: bool = False
    scaled: bool = False


class _Norm:
    """What is computed from the sum of squares `node` of x: `end`, the normalised value with gamma and beta, or None."""

    def __init__(self, part, node: Node, x: Value):
        self.x, self.axes = x, set(map(int, node.params["axes"]))
        self.statistics: dict[Value, None] = {}  # in order
        self.full: dict[Value, _Step] = {}
        self.parameters: list[tuple[Value, Value]] = []  # gamma and beta, with the value that they are applied to
        self.nodes: list[Node] = []
        self.mismatch = self.unfused = ""
        self.first = node.index
        self.same = self._shapes(x)
        self._seed(node, x)
        self._follow()
        self.end = self._end([v for v, step in self.full.items() if step.scaled and (self._readers(v) or part.is_returned(v))])
        self.centered = self.end is not None and self.full[self.end].centered

    @functools.cached_property
    def moments(self) -> Statistics:
        """Those of x that a kernel computes."""
        seen = [(value, Layout(self.x.shape, IndexMap.of(value.shape))) for value in self.same]
        return Statistics(self.x, tuple(d for d in range(self.x.ndim) if d not in self.axes), seen)

    def _end(self, ends: list[Value]) -> Value | None:
        """The one of the scaled values, which others read, that the norm ends in: before a transpose in the end, from where the walk
        goes on; and of what is read here as it is and there in another shape or type, the last that all of these are made of.
        What follows is no part of it."""
        paths = [self._path(end) for end in ends]
        last = max(ends, key=lambda v: v.node.index, default=None)
        if len(ends) == 1:
            end = next((before for v, before in reversed([*zip(paths[0], paths[0][1:])]) if v.node.primitive == "transpose"), last)
        else:
            end = next((v for v in (paths or [[]])[0] if all(v in path for path in paths)), None)
        after = [v.node for path in paths if end for v in path[: path.index(end)]]
        self.nodes = [n for n in self.nodes if n not in after]
        self.full = {value: step for value, step in self.full.items() if value.producer not in after}
        return end or last

    def _path(self, value: Value) -> list[Value]:
        """The value and what it is a cast or a move of, as far as that is scaled."""
        path, mine = [value], {n.index for n in self.nodes}
        while (node := path[-1].node).index in mine and node.primitive in SHAPED and self.full[node.inputs[0]].scaled:
            path.append(node.inputs[0])
        return path

    def _seed(self, node: Node, x: Value):
        """With the sum of squares, the sum of x over the same axes, x and its other shapes and types."""
        for value in self.same:
            self.full[value] = _Step()
            for user in value.users:
                if user.primitive == "reduce_sum" and user.params["axes"] == node.params["axes"]:
                    self.statistics[user.out] = None
                    self.nodes.append(user)
        self.statistics[node.out] = None
        self.nodes += [narrowest(node.inputs[0]).node, node]

    def _follow(self):
        """What is computed of the seeds, in program order."""
        frontier = {n.index: n for value in (*self.full, *self.statistics) for n in value.users if n.index >= 0}
        seen = {n.index for n in self.nodes}
        while frontier and len(seen) < LARGEST:
            node = frontier.pop(min(frontier))
            if node.index in seen or len(node.outputs) != 1 or node.primitive not in (*ARITHMETIC, *SHAPED):
                continue
            if node.primitive == CAST and not is_float_cast(node):  # to an integer: another number
                continue
            seen.add(node.index)
            if self._is_statistic(node):
                self.statistics[node.out] = None
            elif (step := self._step(node)) is not None:
                self.full[node.out] = step
            else:
                continue
            self.nodes.append(node)
            frontier |= {n.index: n for n in node.out.users if n.index >= 0}

    def _shapes(self, x: Value) -> list[Value]:
        """x, what it is a reshape or cast of, and the casts and reshapes of these."""
        values = [x]
        while len(values) < 3 and (node := values[-1].producer) is not None and (node.primitive == "reshape" or is_float_cast(node)):
            values.append(node.inputs[0])
        return values + [n.out for value in values for n in value.users if is_float_cast(n) and n.out not in values]

    def _is_statistic(self, node: Node) -> bool:
        """Computed from statistics, parameters and numbers, not from x."""
        others = [v for v in node.inputs if v not in self.statistics]
        return len(others) < len(node.inputs) and all(self._is_small(v) for v in others)

    def _is_small(self, value: Value) -> bool:
        """A number, or a parameter: not another full-size value."""
        if value in self.full:
            return False
        smaller = len(varying_axes(value)) < self.x.ndim - len(self.axes) + 1 and (size(value) < size(self.x) or is_parameter(value))
        return smaller or constant(value) is not None

    def _step(self, node: Node) -> _Step | None:
        """What the node does to x on its way, None if it is no step of a norm."""
        inside = [v for v in node.inputs if v in self.full]
        if not inside:
            return None
        before = [self.full[v] for v in inside]
        step = _Step(any(s.centered for s in before), any(s.scaled for s in before))
        if node.primitive in SHAPED:
            return step if step.scaled or step.centered or node.primitive == CAST else None
        others = [v for v in node.inputs if v not in self.full]
        if len(node.inputs) != 2 or len(others) != 1:
            return None
        (other,) = others
        if other in self.statistics:
            if node.primitive in ("mul", "div"):
                return None if step.scaled else dataclasses.replace(step, scaled=True)
            return dataclasses.replace(step, centered=True) if node.primitive in (*ADD, "sub") else None
        if node.primitive not in (*ADD, "sub", "mul") or not self._is_small(other) or self._is_made_of_the_end(other):
            return None
        if not step.scaled:
            return step if node.primitive == "mul" or constant(other) == 0 else None
        return step if constant(other) is None and self._fits(node, other, inside[0]) else None

    def _is_made_of_the_end(self, other: Value) -> bool:
        """Whether it is computed from what is normalised already, as the mean of a norm that follows is: no gamma or beta."""
        scaled = {id(value) for value, step in self.full.items() if step.scaled}
        return depends_on([other], scaled, self.first)

    def _fits(self, node: Node, parameter: Value, value: Value) -> bool:
        """Gamma and beta vary along normalised axes, or along the channels if x was regrouped or an instance is normalised."""
        kind = "scale" if node.primitive == "mul" else "bias"
        along = varying_axes(parameter)
        channels = {1, value.ndim - 1} if len(self.axes) > 1 or self.x.ndim - len(self.axes) == 2 else set()
        if value.shape != self.x.shape or along <= self.axes or len(along) == 1 and along <= channels:
            self.parameters.append((parameter, value))
            return True
        axes = tuple(sorted(self.axes))
        wrong = min(along - self.axes)
        self.mismatch = self.mismatch or f"operand {parameter!r} varies along axis {wrong}, the normalised axes are {axes}"
        self.unfused = self.unfused or f"+{kind}"
        return False

    def _readers(self, value: Value) -> list[Node]:
        """What reads the value and is not part of the norm."""
        mine = {n.index for n in self.nodes}
        return [n for n in value.users if n.index not in mine]

    def has_mean(self) -> bool:
        """Whether a sum is divided by its count: what is divided by its length is a vector, not a norm layer."""
        return any(moment.weight == 1 for moment in self.moments.known.values())

    def scaled_along(self, kept: list[int]) -> bool:
        """Whether gamma or beta has one number for each channel, not for each place in a row."""
        return any(v.ndim == self.x.ndim and varying_axes(p) and varying_axes(p) <= set(kept) for p, v in self.parameters)

    def stop_gradient_reason(self) -> str:
        """The op's value is the same, its gradient is not."""
        node = next((n for n in self.nodes if n.primitive == "stop_gradient"), None)
        return f"{node} holds a part of it: the kernel's gradient is that of the whole" if node else ""

    def read_elsewhere(self, part) -> str:
        for value, step in self.full.items():
            if value is not self.end and (step.scaled or step.centered):
                if readers := self._readers(value):
                    return f"{value!r} is read by {readers[0]} too"
                if part.is_returned(value):
                    return f"{value!r} is returned by the program"
        return ""
