"""Layer, RMS, group and instance norm: statistics of each row, each group of channels, each channel of each example.

From a sum of squares the forms of what is computed of x and of the statistics are followed as far as it is a norm (norm.py).
form.py reads off what the last of them is, site.py makes a Match of it.
"""

import functools
from collections.abc import Iterator

from jaxfuse.analysis.normal import ADD, narrowest, varying_axes
from jaxfuse.analysis.sums import squared
from jaxfuse.patterns.norm.form import UNREAD, read_form
from jaxfuse.patterns.norm.norm import Norm
from jaxfuse.patterns.norm.site import Site
from jaxfuse.patterns.walk import Chain, Walk, longest
from jaxfuse.program.autodiff import recomputed
from jaxfuse.program.graph import Node, Value
from jaxfuse.program.site import Match, Refusal, Unfit, UnfusedStep
from jaxfuse.runtime.reasons import Unprofitable, no_kernel


def anchors(graph):
    """Sums over some axes of the squares of a value, or of a value less its mean."""
    return [n for n in recomputed(graph).nodes if n.primitive == "reduce_sum" and _normalised(n) is not None]


def _normalised(node: Node) -> Value | None:
    """What the sum of squares `node` is a statistic of."""
    base, masked = squared(node.inputs[0]) or (None, True)
    return None if masked else base


def match(graph, node: Node, claimed: set[int], unprofitable):
    """Yields the norm that the sum of squares is made into as a Match, with as much before and after it as the kernel takes, and its
    gradient as another; a Refusal for what it does not take."""
    x = _normalised(node)
    if x is None:
        return
    kept = tuple(d for d in range(x.ndim) if d not in node.params["axes"])
    if len(kept) == 1 and kept != (0,):  # batch_norm's
        return
    part = recomputed(graph)
    norm = Norm(part, x, kept)
    if norm.end is None and norm.has_mean and (reason := _unknown(norm)):
        yield Refusal("norm", node, (x,), reason)
    if norm.end is not None and (norm.centered or norm.has_mean) and not any(n.index in claimed for n in norm.nodes):
        yield from _rows(graph, node, norm, norm.end, claimed, unprofitable)


def _rows(graph, node: Node, norm: Norm, end: Value, claimed: set[int], unprofitable) -> Iterator[Match | Refusal]:
    part, x = norm.part, norm.x
    name, reason = _name(norm, end)
    reason = reason or norm.stop_gradient_reason() or norm.read_elsewhere()
    before = _add_before(x, claimed)
    label, nodes = (f"add+{name}", (before, *norm.nodes)) if before else (name, (*norm.nodes,))
    if reason:
        yield Refusal(label, node, (x,), reason, nodes=nodes)
        return
    chains, _ = Walk(part, end.ndim - 1, claimed).chains(end)
    if norm.stop:  # a step that is none of its own follows
        chains = [chain for chain in chains if not chain.affine]
    form = functools.cache(lambda: read_form(norm, end))
    dtype = x.dtype if any(chain.end.dtype == x.dtype for chain in chains) else end.dtype

    def attempt(chain: Chain) -> list[Match]:
        site = Site(graph, part, node, norm, form(), chain, before if x.dtype == dtype else None, name)
        if chain.affine or chain.residual is not None:
            raise Unfit(no_kernel("it adds to or scales the normalised value"))
        return site.matches(unprofitable)

    found, _, refused = longest(chains, dtype, attempt)
    yield from found or ()
    if refused and not found:
        shorter = None if isinstance(refused[1].reason, Unprofitable) else norm.shorten(refused[1].reason)
        rows = [*_rows(graph, node, norm, shorter, claimed, unprofitable)] if shorter else []
        if any(isinstance(row, Match) for row in rows):
            yield from rows
            return
        yield Refusal(refused[0].label_of_norm(label), node, (x,), refused[1].reason, nodes=(*nodes, *refused[0].nodes))
    elif refused and refused[0].after_affine:
        yield UnfusedStep(refused[0].label_of_norm(label), node, (x,), refused[1].reason)
    elif norm.stop:
        yield UnfusedStep(f"{label}+{norm.stop.unfused}", node, (x,), norm.stop.reason)


def _unknown(norm: Norm) -> str:
    """Why nothing that its statistics scale is known to be a norm; "" where they scale nothing."""
    if norm.crossed:
        return f"{norm.crossed} combines rows of {norm.x!r} with statistics of others"
    product = norm.unknown_product()
    return (_name(norm, product.out)[1] or UNREAD) if product else ""


def _add_before(x: Value, claimed: set[int]) -> Node | None:
    """A residual add that nothing else took, right before the norm."""
    node = x.producer
    if node is not None and node.primitive in ADD and node.index not in claimed and len(set(node.inputs)) == 2:
        if all(v.shape == x.shape and v.dtype == x.dtype and len(varying_axes(v)) > 1 for v in node.inputs):
            return node
    return None


def _name(norm: Norm, end: Value) -> tuple[str, str]:
    """(name, what is wrong with the axes)."""
    x, axes, kept, last = norm.x, sorted(norm.axes), norm.kept, norm.x.ndim - 1
    trailing = axes == list(range(len(kept), x.ndim))
    if _regrouped(x, len(axes), end):
        return "group_norm", ""
    if 0 in kept and x.ndim > 2 and (kept == (0, last) or trailing and len(axes) > 1 and norm.has_channel_parameters):
        return "instance_norm", ""
    if trailing:
        return "layer_norm" if norm.centered else "rms_norm", ""
    return "norm", f"statistics over axes {tuple(axes)} of {x!r}: a layer norm is over the last axes"


def _regrouped(x: Value, axes: int, end: Value) -> bool:
    """Whether x is another array with its channels split into groups, normalised over more than the channels of one place,
    or to be put together again."""
    node = narrowest(x).producer
    if node is None or node.primitive != "reshape":
        return False
    source = node.inputs[0]
    split = x.shape[-1] != source.shape[-1]
    return axes > 1 and (split or x.ndim > source.ndim) or split and end.shape != x.shape
