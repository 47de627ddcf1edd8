"""A contraction, be it a convolution or a product, as one call of its op with what follows it, a bias, a residual, an activation; and
what autodiff has made of it: the gradients of both operands and of the bias, which share a cotangent, and the derivative of the
activation that the cotangent comes through.

What comes before it, which config it has, and how the op computes its gradients is said in the op's own folder.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from jaxfuse.analysis.gradients import CONTRACTIONS, gradients_of
from jaxfuse.analysis.layout import inverse, to_layout
from jaxfuse.analysis.normal import is_float_cast, nbytes
from jaxfuse.analysis.regions import depends_on
from jaxfuse.ops.activations import NO_ACTIVATION, Activation, named
from jaxfuse.ops.arrays import as_vector
from jaxfuse.ops.op import FusedOp, Linear
from jaxfuse.ops.stage import Kernel, type_of
from jaxfuse.patterns.activation_grad import activation_grads_at
from jaxfuse.patterns.kernel import require, require_unread
from jaxfuse.patterns.walk import Chain, WalkEnd, longest
from jaxfuse.program.autodiff import Subgraph, backward, forward
from jaxfuse.program.elementwise import is_elementwise
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.program.transposes import transposed

NARROW = (jnp.bfloat16, jnp.float16)
SAME_VALUES = {named("maximum0"): named("relu"), named("clip6"): named("relu6")}  # and at ties another derivative
Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Contraction:
    """`node` makes `out` of x and w, by way of the nodes `between`; `features` are the axes of `out` that are w's. `chains` are what
    a walk over `part` of the graph has found after it, shortest first, and `stop` is why it ended."""

    op: ClassVar[FusedOp]
    claims_refused: ClassVar[bool] = False  # whether a row of what is refused speaks of its nodes too

    graph: Graph
    part: Graph | Subgraph
    node: Node
    x: Value
    w: Value
    out: Value
    features: Axes
    chains: list[Chain]
    stop: WalkEnd
    between: tuple[Node, ...]
    regrouped: Callable | None  # makes of x's array what the op takes

    def configured(self, chain: Chain, residual_outs: int) -> tuple[Any, Axes, tuple[Value, ...]]:
        """The op's config but for what all contractions have, the axes of `out` in the order in which the op writes them, and copies
        of the chain's end that lie so; `residual_outs` as the op's configs have it. Raises `Unfit` where the op does not cover it."""
        raise NotImplementedError

    def cost(self, chain: Chain, kernel: Kernel) -> str:
        """Why XLA does better although a kernel takes the chain."""
        if not chain.subtracts or chain.residual is None or kernel.is_plain or kernel.platform != "cpu":
            return ""
        residual = self.part.original(chain.residual)
        if residual.producer and is_elementwise(residual.producer) and len(residual.users) == 1 and not self.graph.is_returned(residual):
            return ""  # XLA changes the sign where it is made
        return "the residual is subtracted: XLA makes one pass of that and of what follows, where a kernel's operand would be another"

    def nodes_of(self, chain: Chain) -> tuple[Node, ...]:
        return (self.node, *self.between, *chain.nodes)

    def bytes_saved(self, chain: Chain) -> int:
        return 2 * nbytes(chain.end) if chain.nodes else 0

    def label(self, chain: Chain) -> str:
        return chain.label(self.op.name)

    def rows(self, operands: tuple[Value, ...], unprofitable) -> Iterator[Match | Refusal]:
        """The Match of the longest chain that a kernel takes; what it does not take as a Refusal, or as a step that stays outside."""
        emission, chain, refused = longest(self.chains, self.node.out.dtype, lambda chain: self.fused(chain, unprofitable), self._ends_wide)
        if emission:
            read = (*operands, chain.residual) if chain.residual is not None else operands
            yield Match(self.label(chain), self.node, self.nodes_of(chain), (emission,), read, self.bytes_saved(chain))
        if refused:
            label, nodes = self.label(refused[0]), self.nodes_of(refused[0]) if self.claims_refused else ()
            yield (UnfusedStep if emission else Refusal)(label, self.node, operands, refused[1].reason, nodes=nodes)
        elif self.stop.unfused:
            yield UnfusedStep(f"{self.label(chain)}+{self.stop.unfused}", self.node, operands, self.stop.reason)

    def _ends_wide(self, chain: Chain) -> bool:
        """Whether the chain of a narrow product, cast and computed with in float32, ends in what has to be written in float32. A
        cast alone, or a value on its way to another step, XLA widens while it reads it: written wide, it would be twice the bytes."""
        if self.node.out.dtype not in NARROW or chain.end.dtype != jnp.float32 or is_float_cast(chain.nodes[-1]):
            return False
        return bool(chain.activation or chain.residual is not None or chain.affine and self.part.is_returned(chain.end))

    def fused(self, chain: Chain, unprofitable) -> Emission:
        """Raises `Unfit` where no kernel takes the chain."""
        original, end, saved = self.part.original, chain.end, self._saved(chain)
        config, order, copies = self.configured(chain, len(saved))
        config = dataclasses.replace(config, has_bias=any(kind in ("add", "sub") for kind, _ in chain.affine),
                                     has_residual=chain.residual is not None, activation=chain.activation or NO_ACTIVATION)
        full = tuple(map(original, (self.x, self.w)))
        features = tuple(self.out.shape[d] for d in order if d in self.features)
        vectors = chain.has_scale + config.has_bias
        types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in full] + [jax.ShapeDtypeStruct(features, jnp.float32)] * vectors
        if self.regrouped:
            types[0] = jax.eval_shape(self.regrouped, types[0])
        if chain.residual is not None and chain.residual_layout is not None:
            if chain.residual.dtype != end.dtype:
                raise Unfit(f"residual {chain.residual!r} is of another dtype than {end!r}")
            added, undo = to_layout(self.graph, original(chain.residual), chain.residual_layout, order)
            full = *full, added
            types.append(jax.ShapeDtypeStruct([self.out.shape[d] for d in order], end.dtype))
        require(self.op.forward, config, types, unprofitable, self.op.name, config, types, cost=lambda kernel: self.cost(chain, kernel))

        def run(read):
            center, scale, offset = chain.coefficients(lambda value: as_vector(read(original(value)), features))
            if center is not None:  # (k - center)·scale + offset = k·scale + (offset - center·scale)
                shift = -center if scale is None else -center * scale
                offset = shift if offset is None else offset + shift
            residual = chain.signed(undo(read(added))) if config.has_residual else None
            operands = [a for a in (scale, offset, residual) if a is not None]
            x = self.regrouped(read(full[0])) if self.regrouped else read(full[0])
            y, *z = self.op(config, x, read(full[1]), *operands)
            placed = chain.layout.place(y, order).astype(end.dtype)
            yield from ((value, (chain.region_layout or chain.layout).place(array, order)) for value, array in zip(saved, z))
            yield from zip(copies, [y])
            yield original(end), placed
            yield from ((original(mask), array) for mask, array in chain.masks_from(placed))

        needs = (*full, *[original(value) for _, value in chain.affine])
        return Emission(needs, (original(end), *copies, *map(original, chain.masks), *saved), run)

    def _saved(self, chain: Chain) -> tuple[Value, ...]:
        """What the activation is applied to, where others, such as the activation's gradient, read that. Raises `Unfit` if they read
        what is inside even so."""
        original = self.part.original
        ends = tuple(map(original, (chain.end, *chain.masks)))
        argument = (original(chain.region.start),) if chain.region and chain.region.start.dtype == chain.end.dtype else ()
        if self.node.index in dead_after(self.graph, ends):
            return ()
        require_unread(self.graph, self.nodes_of(chain), (*ends, *argument))
        return argument


def require_no_sharding(node: Node) -> None:
    """A contraction with an `out_sharding` stays as it is. Raises `Unfit`."""
    sharding = node.params.get("out_sharding")
    if sharding is not None:
        raise Unfit(f"out_sharding {sharding}: no kernel follows it")


# --- gradients ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Of the operands of `node`, and of the bias added to what it gives, for the cotangent `dz` of that; None: not in the program.

    Behind an activation the cotangent is dy·act'(z), by the nodes `products`, and `saved` tells the derivative: the activation's
    value, or z where the value does not tell it. Else dy is dz. `sums` are values that are computed along with the gradients,
    `parameters` what else is read for these."""

    op: ClassVar[FusedOp]

    node: Node
    dz: Value
    dy: Value
    dx: Value | None
    dw: Value | None
    db: Value | None = None
    activation: Activation = NO_ACTIVATION
    saved: tuple[Value, ...] = ()
    products: tuple[Node, ...] = ()
    sums: tuple[Value, ...] = ()
    parameters: tuple[Value, ...] = ()

    @classmethod
    def found(cls, graph: Graph, node: Node, claimed: set[int], may_be_alone: Callable[[Self], bool]) -> list[Self]:
        """The gradients of both operands, for each cotangent that has them. Where none has, those of one of them: operands may be
        shared with other contractions, and a gradient be one of a pair of theirs, which `may_be_alone` is asked."""
        x, w = node.inputs
        if x.literal is not None or w.literal is not None or not all(jnp.issubdtype(v.dtype, jnp.inexact) for v in (x, w)):
            return []
        ways = []
        for gradient in gradients_of(graph, node, backward(graph)):
            dx, dw = (None if v is None or v.node.index in claimed else v for v in gradient.found)
            if gradient.dy not in node.inputs and (dx or dw):
                ways.append(cls(node, gradient.dy, gradient.dy, dx, dw))
        pairs = [way for way in ways if way.dx and way.dw]
        return pairs or sorted(filter(may_be_alone, ways), key=lambda way: way.dx is None)

    def label(self, with_dz: bool = False) -> str:
        """`with_dz`: the cotangent behind the activation is computed too."""
        raise NotImplementedError

    def computed(self, made: tuple[Value, ...], backward: Callable, read: Callable[[Value], Any],
                 operands: list) -> Iterable[tuple[Value, Any]]:
        """The values `made`, as the op's `backward` gives them for these operands, and the sums."""
        return zip(made, backward(*operands))

    @property
    def wanted(self) -> tuple[Value, ...]:
        return tuple(v for v in (self.dx, self.dw, self.db) if v is not None)

    @property
    def bias_type(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (type_of(self.db.aval),) if self.db is not None else ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What computes them, from the cotangent of the activation's value on."""
        nodes = list(self.products)
        for value in self.wanted:
            nodes.append(value.node)
            while nodes[-1].primitive not in (*CONTRACTIONS, "reduce_sum"):
                nodes.append(nodes[-1].inputs[0].node)
        return tuple(nodes)

    def with_bias(self, axes: Axes) -> Self:
        """With the cotangent's sum over these axes, where the program takes it."""
        sums = [n.out for n in self.dz.users if n.primitive == "reduce_sum" and tuple(sorted(n.params["axes"])) == axes]
        return dataclasses.replace(self, db=sums[0]) if sums and axes else self

    def through_activation(self, graph: Graph, chains: list[Chain]) -> Self | None:
        """The same for the cotangent of the activation in one of these chains of the forward pass, if there is one: of the longest
        first, as of hard_sigmoid relu6 is a part. max(z, 0) with the derivative of relu is a relu."""
        original = forward(graph).original
        for activation, region in [(c.activation, c.region) for c in reversed(chains)]:
            if activation is None or region is None or region.start.dtype != self.dz.dtype:
                continue
            z = original(region.start)
            slopes = [slope for slope in activation_grads_at(graph, z, self.dz) if slope.dy.aval == self.dz.aval]
            for known in dict.fromkeys((activation, SAME_VALUES.get(activation, activation))):
                if slope := next((slope for slope in slopes if slope.is_of(known, region if known is activation else None)), None):
                    saved = original(region.end) if known.derivative_from_y else z
                    return dataclasses.replace(self, dy=slope.dy, activation=known, saved=(saved,), products=tuple(slope.products))
        return None

    def fused(self, graph: Graph, config: Any, unprofitable, orders: dict[Value, Axes] | None = None) -> Match:
        """One call of the op's backward stage, which reads x, w, what is saved of the activation, and dy; values in `orders` it reads and
        gives with their axes in that order, as `config` has it. Raises `Unfit` where no kernel takes it."""
        op, node, dz, orders = self.op, self.node, self.dz, orders or {}
        fused_away = dead_after(graph, (*self.wanted, *self.sums))
        with_dz = bool(self.saved) and (graph.is_returned(dz) or any(n.index not in fused_away for n in dz.users))  # others read it
        made = (*self.wanted, dz) if with_dz else self.wanted
        has_bias = bool(self.bias_type)
        config = op.for_autodiff(dataclasses.replace(config, has_bias=has_bias, has_residual=with_dz, activation=self.activation))

        def ordered(value: Value) -> Value:
            return transposed(graph, value, orders[value]) if value in orders else value

        operands = tuple(map(ordered, (*node.inputs, *self.saved, self.dy)))
        given = tuple(type_of(v.aval) for v in operands)
        types = (*given[:2], *self.bias_type, *([type_of(ordered(dz).aval)] if with_dz else []))
        wanted = [self.dx is not None, self.dw is not None, *[True for has in (has_bias, with_dz) if has]]
        linear = Linear(config, tuple(wanted), types, len(operands) - 1)
        require(op.backward, linear, given, unprofitable, op.name, config, types, "backward")

        def run(read):
            arrays = [*map(read, operands)]
            for value, array in self.computed(made, functools.partial(op.backward, linear), read, arrays):
                if value in orders:
                    yield ordered(value), array
                    array = jnp.transpose(array, inverse(orders[value]))
                yield value, array

        needs = (*operands, *self.parameters)
        defines = tuple(dict.fromkeys(v for value in (*made, *self.sums) for v in (ordered(value), value)))
        if depends_on(needs, defines):
            raise Unfit("the gradients depend on each other")
        saved = nbytes(dz) * (has_bias + 2 * len(self.saved))
        return Match(self.label(with_dz), node, (), (Emission(needs, defines, run),), (self.dy, *node.inputs), saved, "backward")
