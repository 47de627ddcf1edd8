"""Fused layers for Flax: `jaxfuse.flax.linen` and `jaxfuse.flax.nnx`. Each imports its half of Flax, an optional extra."""

from typing import NamedTuple


class Exchanged(NamedTuple):
    """What became of one module of a model.

    path: where it is ("Bottleneck_0/Conv_1", "layers.0.conv"), "" for the model; was: its class; now: the drop-in that it
    runs as, or `was` if there is none or no kernel takes it; reason: why not, "" if it was exchanged.
    """

    path: str
    was: type
    now: type
    reason: str
