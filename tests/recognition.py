"""What `explain` says of patterns that are recognised before their kernels exist: rows, and how tests compare them."""

import collections
import os

import jax
import jax.numpy as jnp

import jaxfuse

os.environ.setdefault("KERAS_BACKEND", "jax")
NO_KERNEL = "no kernel yet on cpu"
FUSED = "fused"


def rows(fn, *args) -> list[tuple[str, str]]:
    """(pattern, reason) of every row, in program order; backward rows have "backward" before the pattern."""
    report = jaxfuse.explain(fn, *args, policy="always")
    fused = [(site, FUSED) for site in report.fused]
    return [
        (" ".join(["backward"] * (site.direction == "backward") + [site.pattern]), reason)
        for site, reason in [*fused, *[(site, site.reason) for site in report.skipped]]
    ]


def recognised(fn, *args) -> list[str]:
    """The patterns of all rows, each of which is fused or has nothing against it but that there is no kernel."""
    found = rows(fn, *args)
    assert {reason for _, reason in found} <= {NO_KERNEL, FUSED}, found
    return [pattern for pattern, _ in found]


def counts(fn, *args) -> dict[str, int]:
    return dict(collections.Counter(recognised(fn, *args)))


def randn(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape, dtype)


def scalar(fn):
    """A loss over all that `fn` returns, with no activation at its end."""
    return lambda *args: sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(fn(*args)))
