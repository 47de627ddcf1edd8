"""Fused layers for Flax: `jaxfuse.flax.linen` and `jaxfuse.flax.nnx`. Each imports its half of Flax, an optional extra."""
