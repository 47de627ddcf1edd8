"""Inference with constant weights: what depends on them alone is computed once, and normalisations become part of them."""

from jaxfuse.frozen.artefact import ArtefactError, load
from jaxfuse.frozen.freeze import Frozen, freeze

__all__ = ["ArtefactError", "Frozen", "freeze", "load"]
