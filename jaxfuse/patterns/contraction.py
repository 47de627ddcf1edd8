"""A contraction, be it a convolution or a product, as one call of its op, with what follows it: a bias, a residual, an activation.

What comes before it, and which config it has, is said in the op's own folder.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfuse.analysis.layout import to_layout
from jaxfuse.analysis.normal import is_float_cast, size
from jaxfuse.ops.activations import NO_ACTIVATION
from jaxfuse.ops.op import FusedOp, Kernel
from jaxfuse.patterns.kernel import require
from jaxfuse.patterns.walk import Chain, WalkEnd, as_vector, longest, require_unread
from jaxfuse.program.autodiff import Subgraph
from jaxfuse.program.graph import Emission, Graph, Node, Value
from jaxfuse.program.liveness import dead_after
from jaxfuse.program.site import Unfit

NARROW = (jnp.bfloat16, jnp.float16)
Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Contraction:
    """`node` makes `out` of x and w, by way of the nodes `between`; `features` are the axes of `out` that are w's. `chains` are what
    a walk over `part` of the graph has found after it, shortest first, and `stop` is why it ended."""

    op: ClassVar[FusedOp]

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

    def configured(self, chain: Chain, saves: int) -> tuple[Any, Axes, tuple[Value, ...]]:
        """The op's config but for what all contractions have, the axes of `out` in the order in which the op writes them, and copies
        of the chain's end that lie so; `saves` as the op's configs have it. Raises `Unfit` where the op does not cover the chain."""
        raise NotImplementedError

    def cost(self, chain: Chain, kernel: Kernel) -> str:
        """Why XLA does better although a kernel takes the chain."""
        return ""

    def nodes_of(self, chain: Chain) -> tuple[Node, ...]:
        return (self.node, *self.between, *chain.nodes)

    def bytes_saved(self, chain: Chain) -> int:
        return 2 * np.dtype(chain.end.dtype).itemsize * size(chain.end) if chain.nodes else 0

    def longest(self, unprofitable) -> tuple[Emission | None, Chain, tuple[Chain, Unfit] | None]:
        """As `walk.longest` has it."""
        return longest(self.chains, self.node.out.dtype, lambda chain: self.fused(chain, unprofitable), self._ends_wide)

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
            residual = undo(read(added)) if config.has_residual else None
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
    """A contraction that was told how its result is to be sharded stays as it is. Raises `Unfit`."""
    sharding = node.params.get("out_sharding")
    if sharding is not None:
        raise Unfit(f"out_sharding {sharding}: no kernel follows it")
