"""Inference with constant weights: what depends on them alone is computed once, and normalisations become part of them."""

from jaxfuse.frozen.artefact import ArtefactError, load
from jaxfuse.frozen.freeze import Frozen, freeze
from jaxfuse.frozen.int8 import Int8Site

__all__ = ["ArtefactError", "Frozen", "Int8Site", "freeze", "load"]
