"""What a walk has followed from its anchor: per-channel affine steps, a residual add, an activation."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

from jaxfuse.analysis.layout import Layout
from jaxfuse.analysis.normal import constant
from jaxfuse.analysis.regions import Region
from jaxfuse.ops.activations import Activation
from jaxfuse.program.graph import Node, Value


@dataclasses.dataclass(frozen=True)
class Chain:
    """act((value₀ - center)·scale + offset + residual), or act(…) + residual, as a list of steps from the anchor's value to
    `end`. Each `layout` is how a value lies compared with the anchor's: the end, what the residual was added to, the activation's
    argument."""

    end: Value
    layout: Layout
    nodes: tuple[Node, ...] = ()
    affine: tuple[tuple[str, Value], ...] = ()  # ("add" | "sub" | "mul" | "div", one number for each channel)
    residual: Value | None = None
    residual_layout: Layout | None = None
    residual_last: bool = False  # added to the activation's value
    activation: Activation | None = None
    region: Region | None = None  # the nodes that compute the activation
    region_layout: Layout | None = None

    def then(self, node: Node, **changes) -> Self:
        """With one more node at its end."""
        return dataclasses.replace(self, end=node.out, nodes=(*self.nodes, node), **changes)

    @property
    def masks(self) -> tuple[Value, ...]:
        """Comparisons of the activation's argument, which autodiff keeps."""
        return self.region.masks if self.region else ()

    def masks_from(self, y) -> Iterator[tuple[Value, object]]:
        """The masks, computed from the activation's value `y`."""
        if self.region and self.masks:
            yield from zip(self.masks, self.region.replay(y, self.masks))

    @property
    def affine_steps(self) -> tuple[str, ...]:
        """"bias" and "scale", in the order in which they come first."""
        return tuple(dict.fromkeys("bias" if kind in ("add", "sub") else "scale" for kind, _ in self.affine))

    @property
    def steps(self) -> tuple[str, ...]:
        """Like ("bias", "add", "relu"). Factors with a mean before them, or a shift after them, are a normalisation, "bn". A number,
        or factors after a bias as in ConvNeXt, are a scale."""
        steps = self.affine_steps
        factors = any(kind in ("mul", "div") and constant(value) is None for kind, value in self.affine)
        centered = any(kind == "sub" for kind, _ in self.affine) or bool(self.affine) and self.affine[-1][0] == "add"
        return (*(["bn"] if factors and centered and len(steps) == 2 else steps), *self.after_affine)

    def label(self, anchor: str) -> str:
        """Like "conv+bias+add+relu"."""
        return "+".join([anchor, *self.steps])

    def label_of_norm(self, norm: str) -> str:
        """The same where the steps per channel are the norm's own."""
        return "+".join([norm, *self.after_affine])

    @property
    def after_affine(self) -> tuple[str, ...]:
        """The steps after those per channel, in their order: "add", and the activation's name."""
        added = ("add",) if self.residual is not None else ()
        activated = (self.activation.name,) if self.activation else ()
        return activated + added if self.residual_last else added + activated

    def coefficients(self, vector: Callable[[Value], Any]):
        """(center, scale, offset), None where there is none; `vector` gives a step's operand as `[channels]`."""
        center = scale = offset = None
        for kind, value in self.affine:
            operand = vector(value)
            if kind == "sub" and center is scale is offset is None:
                center = operand
            elif kind in ("add", "sub"):
                signed = operand if kind == "add" else -operand
                offset = signed if offset is None else offset + signed
            else:
                factor = operand if kind == "mul" else 1 / operand
                scale = factor if scale is None else scale * factor
                offset = offset if offset is None else offset * factor
        return center, scale, offset

    @property
    def has_scale(self) -> bool:
        return any(kind in ("mul", "div") for kind, _ in self.affine)
