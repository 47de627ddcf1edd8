"""A pytest plugin for other projects' tests: every function that they jit is fused, or their layers are exchanged for ours.

JAXFUSE_OTHERS is "plain" (nothing is changed), "fused" (`jax.jit` is `jaxfuse.fuse` with policy "always") or "layers" (Flax's layers are
those of `jaxfuse.flax`). The numbers of sites that were fused are added up in the file that JAXFUSE_OTHERS_SITES names.
"""

import os
import sys

import jax

MODE = os.environ.get("JAXFUSE_OTHERS", "plain")
sites: list[int] = []


def pytest_configure(config):
    if MODE != "plain":
        _count_sites()
    if MODE == "fused":
        _fuse_every_jit()
    if MODE == "layers":
        _exchange_layers()


def pytest_unconfigure(config):
    if path := os.environ.get("JAXFUSE_OTHERS_SITES"):
        with open(path, "a") as file:
            print(sum(sites), file=file)


def _count_sites():
    from jaxfuse import report

    log = report.log

    def counted(found):
        sites.append(len(found.fused))
        log(found)

    report.log = counted


def _fuse_every_jit():
    import jaxfuse

    plain = jax.jit

    def jit(*args, **options):
        caller = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        # Flax's own jits carry state, which a test's fused function leaves to them
        return plain(*args, **options) if caller in ("flax", "jaxfuse") else jaxfuse.fuse(*args, policy="always", **options)

    jax.jit = jit


def _exchange_layers():
    import flax.linen
    import flax.nnx

    import jaxfuse.flax.linen
    import jaxfuse.flax.nnx

    for theirs, ours in ((flax.linen, jaxfuse.flax.linen), (flax.nnx, jaxfuse.flax.nnx)):
        for name in ours.__all__:
            if isinstance(getattr(theirs, name, None), type):
                setattr(theirs, name, getattr(ours, name))
