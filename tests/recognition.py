"""What `explain` says of patterns that are recognised before their kernels exist: rows, and how tests compare them."""

import collections
import os

import jax
import jax.numpy as jnp
import numpy as np

import jaxfuse
from jaxfuse.runtime.reasons import XLA_DOES_THIS

os.environ.setdefault("KERAS_BACKEND", "jax")
NO_KERNEL = "no kernel yet on cpu"
FUSED = "fused"


def rows(fn, *args) -> list[tuple[str, str]]:
    """(pattern, reason) of every row, in program order; backward rows have "backward" before the pattern."""
    report = jaxfuse.explain(fn, *args, policy="always")
    fused = [(site, FUSED) for site in report.fused]
    return [
        (" ".join(["backward"] * (site.direction == "backward") + [site.pattern]), reason)
        for site, reason in [*fused, *[(site, site.reason) for site in (*report.skipped, *report.unfused_steps)]]
    ]


def recognised(fn, *args) -> list[str]:
    """The patterns of all rows, each of which is fused or has nothing against it but that there is no kernel."""
    found = rows(fn, *args)
    assert {reason for _, reason in found} <= {NO_KERNEL, XLA_DOES_THIS, FUSED}, found
    return [pattern for pattern, _ in found]


def fused(fn, *args) -> list[str]:
    """The patterns of the fused sites, with what the fused function returns compared to what `fn` returns."""
    made, plain = (jax.jit(f)(*args) for f in (jaxfuse.fuse(fn, policy="always"), fn))
    for value, expected in zip(jax.tree.leaves(made), jax.tree.leaves(plain), strict=True):
        tolerance = 1e-5 if value.dtype == jnp.float32 else 2e-2
        assert value.dtype == expected.dtype
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (value, expected)), tolerance, tolerance)
    return [site.pattern for site in jaxfuse.explain(fn, *args, policy="always").fused]


def counts(fn, *args) -> dict[str, int]:
    return dict(collections.Counter(recognised(fn, *args)))


def randn(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape, dtype)


def scalar(fn):
    """A loss over all that `fn` returns, with no activation at its end."""
    return lambda *args: sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(fn(*args)))
