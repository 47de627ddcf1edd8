"""What an attention of the program computes: from the product of queries and keys over scale, biases and masks to the softmax, and
on to the product with the values. Every axis gets a letter at that first product, and keeps it (`ops/attention_config.py`)."""

import dataclasses

from jaxfuse.analysis.canonical import ADD, CAST, constant, is_float_cast, is_long, scale_factor
from jaxfuse.patterns.attention.axes import Labels, Operand, aligned, moved, origin
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.site import Unfit

LONGEST = 12  # steps between two of its products, the softmax one of them
LETTERS = "bcfghijklmnopqruvwxyz"  # less those with a meaning: t, s, d, e


@dataclasses.dataclass(frozen=True)
class Form:
    """(`rest`·softmax(scale·q·k + biases, `fill` where a mask is False)·dropped)·v, v times its `factors`. `end` is the result after
    the transposes that follow."""

    q: Value
    k: Value
    v: Value
    specs: tuple[str, str, str]  # of q, k and v
    scale: float
    biases: tuple[Operand, ...]
    masks: tuple[Operand, ...]
    fill: float
    factors: tuple[Operand, ...]
    dropped: tuple[Operand, ...]  # arrays, or masks: 0 where they are False
    rest: float
    end: Value
    out: str  # the letters of `end`, those of axes of length 1 that it lacks before them
    nodes: tuple[Node, ...]


def read_form(part, node: Node, dead) -> Form | None:
    """The attention that begins with this product; None if no softmax and second product follow. `dead` are nodes that nobody
    needs. Raises `Unfit` for an attention that no kernel takes."""
    reader = _Reader(part, node, dead)
    try:
        reader.to_softmax()
        return reader.to_values()
    except Unfit:
        if _leads_to_values(reader.value, reader.key_axis is not None):
            raise
        return None


class _Reader:
    """Follows the scores: `value` with its `labels` is what the next step is done to."""

    def __init__(self, part, node: Node, dead):
        self.part, self.node, self.dead = part, node, dead
        self.nodes, self.value = [node], node.out
        self.scale, self.fill, self.rest = 1.0, 0.0, 1.0
        self.biases: list[Operand] = []
        self.masks: list[Operand] = []
        self.factors: list[Operand] = []
        self.dropped: list[Operand] = []
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
        free = [letter for side in self.sides for letter in side if letter not in ("d", *shared.values())]
        self.labels: Labels = (*shared.values(), *free)
        self.contracted = len(left)

    def to_softmax(self):
        """From the product over scale, biases and masks to the softmax. This and the next raise `Unfit`."""
        for _ in range(LONGEST):
            largest = _maximum_of(self.value)
            if largest is not None:
                self._softmax(largest)
                return
            node = self._only_reader()
            if node is None:
                raise self._read_elsewhere()
            if not self._moved(node):
                self._step(node)
        raise Unfit("it is far from the product to the softmax")

    def _readers(self, value: Value) -> list[Node]:
        return [n for n in value.users if n.index not in self.dead] or list(value.users)

    def _only_reader(self) -> Node | None:
        readers = self._readers(self.value)
        return readers[0] if len(readers) == 1 and not self.part.is_returned(self.value) else None

    def _read_elsewhere(self) -> Unfit:
        readers = " and ".join(map(str, self._readers(self.value)[:3]))
        return Unfit(f"{self.value!r} is {f'read by {readers}' if readers else 'returned by the program'}")

    def _take(self, node: Node, labels: Labels | None = None):
        self.nodes.append(node)
        self.value, self.labels = node.out, self.labels if labels is None else labels

    def _moved(self, node: Node) -> bool:
        """Takes a cast, a transpose, or a reshape that adds or drops axes of length 1."""
        labels = self.labels if is_float_cast(node) else moved(node, self.labels)
        if labels is None:
            return False
        self._take(node, labels)
        return True

    def _step(self, node: Node):
        """Takes a scale, a bias or a mask."""
        if len(node.outputs) != 1 or node.out.shape != self.value.shape:
            raise Unfit(f"{node} is not a scale, a bias or a mask")
        factor = scale_factor(node, self.value)
        if factor is not None:
            if self.biases or self.masks:
                raise Unfit(f"{node} scales what a bias or a mask was applied to")
            self.scale *= factor
        elif node.primitive in ADD and node.inputs[0] is not node.inputs[1]:
            if self.masks:
                raise Unfit(f"{node} adds a bias to masked scores")
            other = node.inputs[1] if node.inputs[0] is self.value else node.inputs[0]
            self.biases.append(origin(other, aligned(other, self.value, self.labels)))
        elif node.primitive == "sub" and node.inputs[0] is self.value and node.inputs[1] is not self.value:
            raise Unfit(f"{node} subtracts from the scores: add what is negative instead")
        elif node.primitive == "select_n" and len(node.inputs) == 3 and self.value in node.inputs[1:]:
            self._mask(node)
            return
        else:
            raise Unfit(f"{node} is not a scale, a bias or a mask")
        self._take(node)

    def _mask(self, node: Node):
        which, *cases = node.inputs
        inverted = cases[0] is self.value  # the value where `which` is False
        fill = constant(cases[0 if not inverted else 1])
        if fill is None or cases[0] is cases[1]:
            raise Unfit(f"{node} gives masked scores something else than one number")
        if self.masks and fill != self.fill:
            raise Unfit(f"{node} is a mask with another number, {fill:g}, than the one before, {self.fill:g}")
        self.fill = fill
        self.masks.append(dataclasses.replace(origin(which, aligned(which, self.value, self.labels)), inverted=inverted))
        self._take(node)

    def _softmax(self, largest: Node):
        """From the scores over e^(score - largest) to that divided by its sum."""
        axis = int(largest.params["axes"][0])
        self.key_axis = self.labels[axis]
        rows = self.labels[:axis] + self.labels[axis + 1 :]
        shifted = self._combined("sub", largest, rows)
        while shifted is None:  # vmap moves axes after the maximum was taken
            transpose = next((n for n in self.value.users if n.primitive == "transpose"), None)
            if transpose is None or not self._moved(transpose):
                raise Unfit(f"{largest} is not the beginning of a softmax")
            shifted = self._combined("sub", largest, rows)
        self._take(shifted)
        e = _only(shifted.out.users, "exp")
        if e is None or self.key_axis is None:
            raise Unfit(f"{largest} is not the beginning of a softmax")
        self._take(e)
        sums = (n for v in (e.out, *[n.out for n in e.out.users if n.primitive == CAST]) for n in v.users if n.primitive == "reduce_sum")
        total = next((n for n in sums if [self.labels[int(d)] for d in n.params["axes"]] == [self.key_axis]), None)
        divided = self._combined("div", total, tuple(a for a in self.labels if a != self.key_axis)) if total else None
        if total is None or divided is None:
            raise Unfit(f"{e} is not divided by its sum")
        self.nodes += [largest, total]
        self._take(divided)

    def _combined(self, primitive: str, node: Node, rows: Labels) -> Node | None:
        """The node that takes from the value, or divides it by, what `node` gives for each of its rows."""
        for user in self.value.users:
            if user.primitive == primitive and user.inputs[0] is self.value:
                found = origin(user.inputs[1], aligned(user.inputs[1], self.value, self.labels), node)
                wide = [a for a, n in zip(found.labels, found.value.shape) if is_long(n)]
                if found.value is node.out and wide == [a for a, n in zip(rows, node.out.shape) if is_long(n)]:
                    return user
        return None

    def to_values(self) -> Form:
        """From the softmax to the product with the values."""
        for _ in range(LONGEST):
            node = self._only_reader()
            if node is None:
                raise self._read_elsewhere()
            if node.primitive == "dot_general" and node.params["dimension_numbers"][0][0]:
                return self._mixed(node)
            if not self._moved(node) and not self._factor(node) and not self._dropout(node):
                raise Unfit(f"{node} is between the softmax and the product with the values")
        raise Unfit("it is far from the softmax to the product with the values")

    def _factor(self, node: Node) -> bool:
        """Takes a factor for each head, as a mask of heads is, which the values may have as well: by a product or as einsum does."""
        if len(node.inputs) != 2 or node.inputs[0] is node.inputs[1]:
            return False
        side = 0 if node.inputs[0] is self.value else 1
        other, labels, after = node.inputs[1 - side], self.labels, self.labels
        if node.primitive == "dot_general":
            batch = node.params["dimension_numbers"][1]
            own = dict(zip(batch[1 - side], (labels[d] for d in batch[side])))
            taken = tuple(own.get(d) for d in range(other.ndim))
            after = (*own.values(), *[a for d, a in enumerate(labels) if d not in batch[side]])
        elif node.primitive == "mul":
            taken = aligned(other, self.value, labels)
        else:
            return False
        found = origin(other, taken)
        whole = len(after) == node.out.ndim and len(found.spec) >= sum(is_long(n) for n in found.value.shape)
        if not whole or not set(found.spec) <= set(self.shared):
            return False
        self.factors.append(found)
        self._take(node, after)
        return True

    def _dropout(self, node: Node) -> bool:
        """Takes what multiplies the softmax: a number, an array, or a mask outside of which it is 0."""
        if len(node.outputs) != 1 or node.out.shape != self.value.shape:
            return False
        number = scale_factor(node, self.value)
        if number is not None:
            self.rest *= number
        elif node.primitive == "mul" and node.inputs[0] is not node.inputs[1]:
            other = node.inputs[1] if node.inputs[0] is self.value else node.inputs[0]
            self.dropped.append(origin(other, aligned(other, self.value, self.labels)))
        elif node.primitive == "select_n" and len(node.inputs) == 3 and 0 in map(constant, node.inputs[1:]):
            which, first, _ = node.inputs
            found = origin(which, aligned(which, self.value, self.labels))
            self.dropped.append(dataclasses.replace(found, inverted=first is self.value))
        else:
            return False
        self._take(node)
        return True

    def _mixed(self, node: Node) -> Form:
        side = 0 if node.inputs[0] is self.value else 1
        if node.inputs[0] is node.inputs[1]:
            raise Unfit(f"{node} multiplies the softmax by itself")
        contracted, batch = node.params["dimension_numbers"]
        own, other = (pair[side] for pair in (contracted, batch)), (pair[1 - side] for pair in (contracted, batch))
        (own_contracted, own_batch), (v_contracted, v_batch) = own, other
        if [self.labels[d] for d in own_contracted] != [self.key_axis] or self.contracted != 1:
            raise Unfit(f"{node} does not sum over the softmax's axis alone")
        v = node.inputs[1 - side]
        known = {**{d: self.labels[p] for d, p in zip(v_batch, own_batch)}, v_contracted[0]: self.key_axis}
        free = [d for d in range(v.ndim) if d not in known]
        if len(free) != 1:
            raise Unfit(f"the values, {v!r}, have {len(free)} axes of their own: the kernel takes one")
        v_labels = tuple("e" if d in free else known[d] or next(self.fresh, None) for d in range(v.ndim))
        left = [self.labels[d] for d in range(self.value.ndim) if d not in (*own_contracted, *own_batch)]
        batch_labels = [self.labels[d] for d in own_batch]
        self._take(node, (*batch_labels, *left, "e") if side == 0 else (*batch_labels, "e", *left))
        while (after := self._only_reader()) is not None and after.primitive == "transpose" and self._moved(after):
            pass
        return self._form(v, v_labels)

    def _form(self, v: Value, v_labels: Labels) -> Form:
        free = [[a for a in side if a != "d" and not all(a in other for other in self.sides)] for side in self.sides]
        keys = next((i for i in (0, 1) if free[i] == [self.key_axis]), None)
        if keys is None or not free[1 - keys]:
            raise Unfit(f"{self.node} has other keys than one axis of one of its operands, or no rows")
        q, k = self.node.inputs[1 - keys], self.node.inputs[keys]
        sizes = {letter: n for value, side in zip(self.node.inputs, self.sides) for letter, n in zip(side, value.shape)}
        rows = max(free[1 - keys], key=sizes.__getitem__)
        renamed = {rows: "t", self.key_axis: "s"}

        def named(labels: Labels) -> Labels:
            return tuple(renamed.get(a, a) if a else None for a in labels)

        def operands(found):
            return tuple(dataclasses.replace(o, labels=named(o.labels)) for o in found)

        specs = [named(labels) for labels in (self.sides[1 - keys], self.sides[keys], v_labels)]
        lost = [a for a in specs[0] if a and a != "d" and a not in named(self.labels)]
        if any(None in spec for spec in specs) or any(is_long(sizes[a]) for a in self.sides[1 - keys] if renamed.get(a, a) in lost):
            raise Unfit(f"{self.node} and the product with the values do not have the same axes")
        of_q, of_k, of_v = ("".join(filter(None, spec)) for spec in specs)
        out = "".join((*lost, *filter(None, named(self.labels))))
        return Form(q, k, v, (of_q, of_k, of_v), self.scale, operands(self.biases), operands(self.masks), self.fill, tuple(self.factors),
                    operands(self.dropped), self.rest, self.value, out, tuple(self.nodes))


def _maximum_of(value: Value) -> Node | None:
    """The maximum along one axis, as a softmax takes it."""
    return next((n for n in value.users if n.primitive == "reduce_max" and len(n.params["axes"]) == 1), None)


def _leads_to_values(value: Value, softmax: bool) -> bool:
    """Whether what is made of it goes to a softmax, if that has not begun, and then to another product."""
    for _ in range(2 * LONGEST):
        softmax = softmax or _maximum_of(value) is not None
        if not value.users:
            return False
        node = value.users[0]
        if node.primitive == "dot_general" or not node.outputs:
            return softmax and node.primitive == "dot_general"
        value = node.outputs[0]
    return False


def _only(users, primitive: str) -> Node | None:
    """The one reader that is of this primitive."""
    found = [n for n in users or () if n.primitive == primitive]
    return found[0] if len(found) == 1 else None
