"""What an attention of the program computes: from the product of queries and keys over scale, biases and masks to the softmax, and
on to the product with the values. Every axis gets a letter at that first product, and keeps it (`ops/attention_config.py`)."""

import dataclasses

import numpy as np

from jaxfuse.analysis.axes import is_long
from jaxfuse.analysis.normal import ADD, CAST, constant, is_float_cast, scale_factor, scaled
from jaxfuse.patterns.attention.axes import Labels, Operand, aligned, moved, of_product, origin
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.site import Unfit

LONGEST = 12  # steps between two of its products, the softmax one of them
LETTERS = "bcfghijklmnopqruvwxyz"  # less those with a meaning: t, s, d, e


@dataclasses.dataclass
class Form:
    """(`softmax_scale`·softmax(scale·q·k + biases, `fill` where a mask is False)·dropout)·v, v times its `factors`. `end` is the result
    after the transposes that follow."""

    nodes: list[Node]
    scale: float = 1.0
    biases: list[Operand] = dataclasses.field(default_factory=list)
    masks: list[Operand] = dataclasses.field(default_factory=list)
    fill: float = 0.0
    factors: list[Operand] = dataclasses.field(default_factory=list)
    dropout: list[Operand] = dataclasses.field(default_factory=list)  # arrays, or masks: 0 where they are False
    softmax_scale: float = 1.0
    qkv: tuple[Value, ...] = ()
    specs: tuple[str, str, str] = ("", "", "")  # of q, k and v
    out: str = ""  # the letters of `end`, those of axes of length 1 that it lacks before them

    @property
    def end(self) -> Value:
        return self.nodes[-1].out


def read_form(part, node: Node, dead, unscaled: bool) -> Form | None:
    """The attention that begins with this product; None if no softmax and second product follow. `dead` are nodes that nobody
    needs; `unscaled`: q and k are those before they are scaled. Raises `Unfit` for an attention that no kernel takes."""
    reader = _Reader(part, node, dead, unscaled)
    try:
        reader.to_softmax()
        reader.to_values()
        return reader.form
    except Unfit:
        if _leads_to_values(reader.value, reader.key_axis is not None):
            raise
        return None


class _Reader:
    """Follows the scores: `value` with its `labels` is what the next step is done to."""

    def __init__(self, part, node: Node, dead, unscaled: bool):
        self.part, self.node, self.dead, self.unscaled = part, node, dead, unscaled
        self.form, self.value = Form([node]), node.out
        self.key_axis: str | None = None
        (left, right), (left_batch, right_batch) = node.params["dimension_numbers"]
        self.fresh = iter(LETTERS)
        shared = {d: next(self.fresh, None) for d in left_batch}
        self.shared = tuple(shared.values())
        sides = []
        for operand, contracted, batch in zip(node.inputs, (left, right), (left_batch, right_batch)):
            known = {**dict.fromkeys(contracted, "d"), **dict(zip(batch, shared.values()))}
            sides.append(tuple(known.get(d) or next(self.fresh, None) for d in range(operand.ndim)))
        self.sides = tuple(sides)
        self.labels = of_product(node, *sides)
        self.contracted = len(left)

    def to_softmax(self):
        """From the product over scale, biases and masks to the softmax. This and the next raise `Unfit`."""
        for _ in range(LONGEST):
            largest = maximum_of(self.value)
            if largest is not None:
                self._softmax(largest)
                return
            node = self._only_reader()
            if not self._moved(node):
                self._before_softmax(node)
        raise Unfit("it is far from the product to the softmax")

    def to_values(self):
        """From the softmax to the product with the values."""
        for _ in range(LONGEST):
            node = self._only_reader()
            if node.primitive == "dot_general" and node.params["dimension_numbers"][0][0]:
                self._mixed(node)
                return
            if not self._moved(node) and not self._factor(node):
                self._after_softmax(node)
        raise Unfit("it is far from the softmax to the product with the values")

    def _readers(self) -> list[Node]:
        return [n for n in self.value.users if n.index not in self.dead] or self.value.users

    def _only_reader(self) -> Node:
        readers = self._readers()
        if len(readers) == 1 and not self.part.is_returned(self.value):
            return readers[0]
        words = " and ".join(map(str, readers[:3]))
        raise Unfit(f"{self.value!r} is {f'read by {words}' if words else 'returned by the program'}")

    def _take(self, node: Node, labels: Labels | None = None):
        self.form.nodes.append(node)
        self.value, self.labels = node.out, self.labels if labels is None else labels

    def _moved(self, node: Node) -> bool:
        """Takes a cast, a transpose, or a reshape that adds or drops axes of length 1."""
        labels = self.labels if is_float_cast(node) else moved(node, self.labels)
        if labels is None:
            return False
        self._take(node, labels)
        return True

    def _operand(self, value: Value, until: Node | None = None) -> Operand:
        return origin(value, aligned(value, self.value, self.labels), until)

    def _step(self, node: Node) -> tuple | None:
        """What the node does to the value, if a kernel could: a product with a number ("scale") or with an operand ("mul"), a sum with
        one ("add"), or a number, None if it is none, where the mask that an operand is does not take the value ("mask")."""
        if len(node.outputs) != 1 or node.out.shape != self.value.shape:
            return None
        factor = scale_factor(node, self.value)
        if factor is not None:
            return "scale", factor
        if node.primitive in (*ADD, "mul") and node.inputs[0] is not node.inputs[1]:
            return "mul" if node.primitive == "mul" else "add", self._operand(node.other_input(self.value))
        if node.primitive == "select_n" and len(node.inputs) == 3 and self.value in node.inputs[1:]:
            which, *cases = node.inputs
            inverted = cases[0] is self.value  # the value where `which` is False
            return "mask", constant(cases[inverted]), dataclasses.replace(self._operand(which), inverted=inverted)
        return None

    def _before_softmax(self, node: Node):
        """Takes a scale, a bias or a mask."""
        form, step = self.form, self._step(node)
        match step:
            case "scale", factor:
                if form.biases or form.masks:
                    raise Unfit(f"{node} scales what a bias or a mask was applied to")
                form.scale *= factor
            case "add", bias:
                if form.masks:
                    raise Unfit(f"{node} adds a bias to masked scores")
                form.biases.append(bias)
            case "mask", None, _:
                raise Unfit(f"{node} gives masked scores something else than one number")
            case "mask", fill, mask:
                if form.masks and fill != form.fill:
                    raise Unfit(f"{node} is a mask with another number, {fill:g}, than the one before, {form.fill:g}")
                form.fill = fill
                form.masks.append(mask)
            case _:
                if node.primitive == "sub" and node.inputs[0] is self.value and node.inputs[1] is not self.value:
                    raise Unfit(f"{node} subtracts from the scores: add what is negative instead")
                raise Unfit(f"{node} is not a scale, a bias or a mask")
        self._take(node)

    def _after_softmax(self, node: Node):
        """Takes what multiplies the softmax: a number, an array, or a mask outside of which it is 0."""
        match self._step(node):
            case "scale", factor:
                self.form.softmax_scale *= factor
            case ("mul", factors) | ("mask", 0, factors):
                self.form.dropout.append(factors)
            case _:
                raise Unfit(f"{node} is between the softmax and the product with the values")
        self._take(node)

    def _factor(self, node: Node) -> bool:
        """Takes a factor for each head, as a mask of heads is, which the values may have as well: by a product or as einsum does."""
        if len(node.inputs) != 2 or node.inputs[0] is node.inputs[1] or node.primitive not in ("dot_general", "mul"):
            return False
        if node.primitive == "mul" and any(constant(v) is not None for v in node.inputs):
            return False
        side = 0 if node.inputs[0] is self.value else 1
        other, after = node.inputs[1 - side], self.labels
        if node.primitive == "mul":
            found = self._operand(other)
        else:
            batch = node.params["dimension_numbers"][1]
            own = dict(zip(batch[1 - side], (self.labels[d] for d in batch[side])))
            taken = tuple(own.get(d) for d in range(other.ndim))
            found, after = origin(other, taken), of_product(node, *((after, taken) if side == 0 else (taken, after)))
        whole = node.out.ndim == self.value.ndim and len(found.spec) >= sum(map(is_long, found.value.shape))
        if not whole or not set(found.spec) <= set(self.shared):
            return False
        self.form.factors.append(found)
        self._take(node, after)
        return True

    def _softmax(self, largest: Node):
        """From the scores over e^(score - largest) to that divided by its sum."""
        no_softmax = Unfit(f"{largest} is not the beginning of a softmax")
        axis = int(largest.params["axes"][0])
        self.key_axis = self.labels[axis]
        rows = self.labels[:axis] + self.labels[axis + 1 :]
        while (shifted := self._combined("sub", largest, rows)) is None:  # vmap moves axes after the maximum was taken
            transpose = next((n for n in self.value.users if n.primitive == "transpose"), None)
            if transpose is None or not self._moved(transpose):
                raise no_softmax
        self._take(shifted)
        exponentials = [n for n in shifted.out.users if n.primitive == "exp"]
        if len(exponentials) != 1 or self.key_axis is None:
            raise no_softmax
        (e,) = exponentials
        self._take(e)
        sums = (n for v in (e.out, *[n.out for n in e.out.users if n.primitive == CAST]) for n in v.users if n.primitive == "reduce_sum")
        total = next((n for n in sums if [self.labels[int(d)] for d in n.params["axes"]] == [self.key_axis]), None)
        divided = self._combined("div", total, tuple(a for a in self.labels if a != self.key_axis)) if total else None
        if total is None or divided is None:
            raise Unfit(f"{e} is not divided by its sum")
        self.form.nodes += [largest, total]
        self._take(divided)

    def _combined(self, primitive: str, node: Node, rows: Labels) -> Node | None:
        """The node that takes from the value, or divides it by, what `node` gives for each of its rows."""
        for user in self.value.users:
            if user.primitive == primitive and user.inputs[0] is self.value:
                found = self._operand(user.inputs[1], node)
                wide = [a for a, n in zip(found.labels, found.value.shape) if is_long(n)]
                if found.value is node.out and wide == [a for a, n in zip(rows, node.out.shape) if is_long(n)]:
                    return user
        return None

    def _mixed(self, node: Node):
        """Takes the product with the values, and the transposes after it."""
        side = 0 if node.inputs[0] is self.value else 1
        if node.inputs[0] is node.inputs[1]:
            raise Unfit(f"{node} multiplies the softmax by itself")
        contracted, batch = node.params["dimension_numbers"]
        if [self.labels[d] for d in contracted[side]] != [self.key_axis] or self.contracted != 1:
            raise Unfit(f"{node} does not sum over the softmax's axis alone")
        v = node.inputs[1 - side]
        known = {**{d: self.labels[p] for d, p in zip(batch[1 - side], batch[side])}, contracted[1 - side][0]: self.key_axis}
        free = [d for d in range(v.ndim) if d not in known]
        if len(free) != 1:
            raise Unfit(f"the values, {v!r}, have {len(free)} axes of their own: the kernel takes one")
        of_v = tuple("e" if d in free else known[d] or next(self.fresh, None) for d in range(v.ndim))
        self._take(node, of_product(node, *((self.labels, of_v) if side == 0 else (of_v, self.labels))))
        while [n.primitive for n in self._readers()] == ["transpose"] and not self.part.is_returned(self.value):
            self._moved(self._only_reader())
        self._name_axes(v, of_v)

    def _name_axes(self, v: Value, of_v: Labels):
        """Gives the rows and the keys their letters."""
        free = [[a for a in side if a != "d" and not all(a in other for other in self.sides)] for side in self.sides]
        keys = next((i for i in (0, 1) if free[i] == [self.key_axis]), None)
        if keys is None or not free[1 - keys]:
            raise Unfit(f"{self.node} has other keys than one axis of one of its operands, or no rows")
        sizes = {letter: n for value, side in zip(self.node.inputs, self.sides) for letter, n in zip(side, value.shape)}
        renamed = {max(free[1 - keys], key=sizes.__getitem__): "t", self.key_axis: "s"}

        def named(labels: Labels) -> Labels:
            return tuple(renamed.get(a, a) if a else None for a in labels)

        form, of_q, of_end = self.form, named(self.sides[1 - keys]), named(self.labels)
        specs = of_q, named(self.sides[keys]), named(of_v)
        lost = [a for a in of_q if a and a != "d" and a not in of_end]
        if any(None in spec for spec in specs) or any(is_long(sizes[a]) for a, name in zip(self.sides[1 - keys], of_q) if name in lost):
            raise Unfit(f"{self.node} and the product with the values do not have the same axes")
        for operands in (form.biases, form.masks, form.factors, form.dropout):
            operands[:] = [dataclasses.replace(operand, labels=named(operand.labels)) for operand in operands]
        form.qkv = self._unscaled(self.node.inputs[1 - keys]), self._unscaled(self.node.inputs[keys]), v
        q_spec, k_spec, v_spec = ("".join(filter(None, spec)) for spec in specs)
        form.specs = q_spec, k_spec, v_spec
        form.out = "".join((*lost, *filter(None, of_end)))


    def _unscaled(self, value: Value) -> Value:
        """The queries or keys before they were multiplied by numbers: these scale the scores."""
        while self.unscaled and value.producer and len(value.users) == 1 and not self.part.is_returned(value):
            step = scaled(value.producer)
            most = 1 if value.dtype == np.float16 else 1e6
            if step is None or not 1e-6 < abs(step[1]) <= most or (step[0].shape, step[0].dtype) != (value.shape, value.dtype):
                break  # nor is a product out of range that was in it before
            self.form.nodes.insert(0, value.producer)
            value, self.form.scale = step[0], self.form.scale * step[1]
        return value


def maximum_of(value: Value) -> Node | None:
    """The maximum along one axis, as a softmax takes it."""
    return next((n for n in value.users if n.primitive == "reduce_max" and len(n.params["axes"]) == 1), None)


def _leads_to_values(value: Value, softmax: bool) -> bool:
    """Whether what is made of it goes to a softmax, if that has not begun, and then to another product."""
    for _ in range(2 * LONGEST):
        softmax = softmax or maximum_of(value) is not None
        if not value.users:
            return False
        node = value.users[0]
        if node.primitive == "dot_general" or not node.outputs:
            return softmax and node.primitive == "dot_general"
        value = node.outputs[0]
    return False
