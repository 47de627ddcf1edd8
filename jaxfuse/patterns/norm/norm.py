"""What is computed from a value and its statistics, as far as it is a norm: which steps it takes, gamma and beta included, and where
it ends."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.forms import Form, Known, Parameter
from jaxfuse.analysis.layout import RESHAPES
from jaxfuse.analysis.normal import ADD, CAST, constant, is_float_cast, is_smaller, varying_axes
from jaxfuse.analysis.regions import cone, depends_on
from jaxfuse.analysis.statistics import MEAN, Statistics
from jaxfuse.patterns.dense.site import is_parameter
from jaxfuse.patterns.walk import WalkEnd, read_elsewhere, step_name
from jaxfuse.program.elementwise import RULES
from jaxfuse.program.graph import Node, Value

SHAPED = (*RESHAPES, "transpose", CAST)
ROOTS = ("sqrt", "rsqrt", "pow")
ARITHMETIC = (*ADD, "sub", "mul", "div", "neg", "max", *ROOTS, "square", "integer_pow", "select_n")


def _given(x: Value) -> list[Value]:
    """x, and what it is a reshape or cast of: the norm may read it in several shapes."""
    values = [x]
    while len(values) < 3 and (node := values[-1].producer) is not None and (node.primitive == "reshape" or is_float_cast(node)):
        values.append(node.inputs[0])
    return values


class Norm(Statistics):
    """What is computed from x and its statistics: `end`, the normalised value with gamma and beta, or None."""

    def __init__(self, part, x: Value, kept: tuple[int, ...]):
        self.part, self.axes = part, set(range(x.ndim)) - set(kept)
        self.stop: WalkEnd | None = None  # the first gamma or beta that is no part of it, and why
        self.crossed: Node | None = None  # what combines rows with statistics of others
        self.given = _given(x)
        same = [v for v in self.given if jnp.promote_types(v.dtype, x.dtype) == x.dtype]  # of which x is no rounding
        casts = [n.out for value in same for n in value.users if is_float_cast(n) and n.out not in self.given]
        super().__init__(x, kept, (*same, *casts))
        ends = [v for v in self.known if self._is_scaled(v) and self._is_read(v)]
        self._end_at(self._end(sorted(ends, key=lambda v: v.node.index)))

    # --- forms: statistics of any kind, and parameters

    def _computed(self, node: Node) -> Known | None:
        if node.primitive == "stop_gradient":
            return self.known[node.inputs[0]]
        full = next((v for v in node.inputs if self.is_tensor(v)), None)
        if full is None:
            operands = [self._operand(v, node) for v in node.inputs]
            tables = [known and known.form.table for known in operands]
            if node.primitive in ARITHMETIC and all(table is not None for table in tables):
                made = np.asarray(RULES[node.primitive](node.params, *tables))
                return self._placed(node, Form.number(made), [known for known in operands if known])
        elif not self._takes(node, full):
            return None
        return super()._computed(node)

    def _operand(self, value: Value, node: Node) -> Known | None:
        known = super()._operand(value, node)
        return known or (self._parameter(value, node) if self._is_small(value) else None)

    def _placed(self, node: Node, form: Form | None, operands: list[Known]) -> Known | None:
        made = super()._placed(node, form, operands)
        if made is None and form is not None and form.degree == 1 and not all(known.form.tensors for known in operands):
            self.crossed = node
        return made

    def _takes(self, node: Node, full: Value) -> bool:
        """Whether what the node does to a full-size value is a step of a norm."""
        scaled = self._is_scaled(full)
        if len(node.inputs) != 2:
            return not scaled
        other = node.other_input(full)
        if self.is_tensor(other):
            return node.primitive == "mul" and not scaled and not self._is_scaled(other)
        if other in self.known:
            return not scaled or node.primitive not in ("mul", "div")
        if node.primitive not in (*ADD, "sub", "mul") or not self._is_small(other):
            return False
        if depends_on([other], [value for value in self.known if self._is_scaled(value)]):  # as the mean of a norm that follows
            return False
        if not scaled:
            return node.primitive == "mul" or constant(other) == 0
        return constant(other) is None and self._fits(node, other, full)

    def _is_small(self, value: Value) -> bool:
        """A number, or a parameter: not another full-size value."""
        along = varying_axes(value)
        few = len(along) < len(self.kept) + 1 or value.ndim == self.x.ndim and along <= self.axes
        smaller = few and (is_smaller(value, self.x) or is_parameter(value))
        return smaller or constant(value) is not None

    def _fits(self, node: Node, parameter: Value, value: Value) -> bool:
        """Gamma and beta vary along normalised axes, or along the channels if x was regrouped or an instance is normalised."""
        along = varying_axes(parameter)
        channels = {1, value.ndim - 1} if len(self.axes) > 1 or len(self.kept) == 2 else set()
        if value.shape != self.x.shape or along <= self.axes or len(along) == 1 and along <= channels:
            return True
        axes, wrong = tuple(sorted(self.axes)), min(along - self.axes)
        reason = f"operand {parameter!r} varies along axis {wrong}, the normalised axes are {axes}"
        self.stop = self.stop or WalkEnd(reason, step_name(node.primitive))
        return False

    # --- where it ends

    def _end_at(self, end: Value | None):
        self.end = end
        self.nodes = self._inside(end) if end else []
        self.centered = end is not None and self._is_centered(end)

    def shorten(self, reason: str) -> Value | None:
        """Ends it a step earlier, for this reason: as before a gamma whose gradient is none of the kernel's, one of each example."""
        path = self._path(self.end, lambda node: True) if self.end else []
        if len(path) < 2:
            return None
        if self.stop is None or path[0].node.primitive not in SHAPED:
            self.stop = WalkEnd(self.stop.reason if self.stop else reason, step_name(path[0].node.primitive))
        self._end_at(path[1])
        return path[1]

    def _is_scaled(self, value: Value) -> bool:
        """Whether x is multiplied by what depends on its statistics."""
        form = self.known[value].form
        return form.degree == 1 and any(np.ptp(table) > 0 for table in form.coefficients[self.x,].terms.values())

    def _is_read(self, value: Value) -> bool:
        """By what has no form, or by the backward pass alone."""
        backward_alone = not value.users and self.part.original(value).users
        return bool(backward_alone) or self.part.is_returned(value) or any(not n.outputs or n.out not in self.known for n in value.users)

    def _end(self, ends: list[Value]) -> Value | None:
        """The one of the scaled values, which others read, that the norm ends in: before a transpose in the end, from where the walk
        goes on; of several, the last that all of these are made of. What follows is no part of it."""
        if len(ends) == 1:
            moved = self._path(ends[0], lambda node: node.primitive in SHAPED)
            before_transposes = [before for v, before in zip(moved, moved[1:]) if v.node.primitive == "transpose"]
            return before_transposes[-1] if before_transposes else ends[0]
        paths = [self._path(end, lambda node: True) for end in ends]
        end = next((v for v in paths[0] if all(v in path for path in paths)), ends[-1]) if paths else None
        steps = [v.node for path in paths for v, before in zip(path, path[1:]) if before is end and v.node.primitive in ("mul", *ADD)]
        if end and steps and self.stop is None:
            self.stop = WalkEnd(read_elsewhere(self.part, end, end.users), step_name(steps[0].primitive))
        return end

    def unknown_product(self) -> Node | None:
        """Of x or what it is centered to, and of what is computed from a root of its variance: with a gamma that has no form, as one over
        axes that lie apart."""
        roots = [v for v, known in self.known.items() if known.form.table is not None and v.producer and v.producer.primitive in ROOTS]
        factors = {n: n.other_input(v) for v in self.known if self.is_tensor(v) for n in v.users if n.primitive in ("mul", "div")}
        return next((n for n, factor in factors.items() if factor not in self.known and depends_on([factor], roots)), None)

    def _path(self, value: Value, goes_through: Callable[[Node], bool]) -> list[Value]:
        """The value and what it is made of, as far as that is scaled."""
        path = [value]
        while goes_through(node := path[-1].node):
            before = next((v for v in node.inputs if v in self.known and self._is_scaled(v)), None)
            if before is None:
                break
            path.append(before)
        return path

    def _inside(self, end: Value) -> list[Node]:
        """The nodes that compute `end` of what is given and of the parameters, and what else is computed of the statistics."""
        of_statistics = [value for value, known in self.known.items() if not known.form.tensors]
        return cone([end, *of_statistics], lambda value: value in self.known and value not in self.given)

    # --- what it is

    def _is_centered(self, value: Value) -> bool:
        """Whether something is taken from x that depends on its statistics."""
        form = self.known[value].form
        scales = form.coefficients[self.x,].terms
        return not all(np.allclose(form.terms.get(parameters, 0), MEAN * table) for parameters, table in scales.items())

    @property
    def has_mean(self) -> bool:
        """Whether a sum is divided by its count: what is divided by its length is a vector, not a norm layer."""
        return any(moment.weight == 1 for moment in self.moments.values())

    @property
    def has_channel_parameters(self) -> bool:
        """Whether gamma or beta has one number for each channel, not for each place in a row."""
        form, kept = self.known[self.end].form if self.end else Form({}), [self.index_map.sub_axes[d] for d in self.kept]
        return any(isinstance(p, Parameter) and ((p.stride, p.length),) in kept for factors in form.terms for p in factors)

    def stop_gradient_reason(self) -> str:
        """The op's value is the same, its gradient is not."""
        node = next((n for n in self.nodes if n.primitive == "stop_gradient"), None)
        return f"{node} holds a part of it: the kernel's gradient is that of the whole" if node else ""

    def _is_for_backward(self, node: Node) -> bool:
        """Whether only the backward pass reads what it gives: the site sees whether it is needed there."""
        return bool(node.outputs) and not any(v.users or self.part.is_returned(v) for v in node.outputs)

    def read_elsewhere(self) -> str:
        for value in (node.out for node in self.nodes):
            form = self.known[value].form
            if value is not self.end and form.degree == 1 and form is not self.itself:
                if readers := [n for n in value.users if n not in self.nodes and not self._is_for_backward(n)]:
                    return f"{value!r} is read by {readers[0]} too"
                if self.part.is_returned(value):
                    return f"{value!r} is returned by the program"
        return ""
