"""Programs of symbolic shapes, as `jax.export` traces them: a kernel takes what does not depend on the unknown numbers.

Whether something depends on them is seen by trying: JAX raises where a number would have to be known.
"""

import jax

from jaxfuse.runtime import private


def unprofitable(of_known):
    """A policy that looks at a representative shape in place of a symbolic one."""

    def known_only(op, config, types, direction="forward", cost=""):
        known = [jax.ShapeDtypeStruct(tuple(map(private.known, t.shape)), t.dtype) for t in types]
        return of_known(op, config, known, direction, cost)

    return known_only


def refused(kernel, config, args) -> str | None:
    """Why the kernel does not take these arguments; None: it does."""
    if not private.is_symbolic(args):
        return kernel.refuse(config, args)
    try:
        reason, run = kernel.refuse(config, args), kernel.run
        if reason is None and run is not None:
            jax.eval_shape(lambda *args: run(config, args, ()), *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args])
    except Exception as error:
        return f"a symbolic shape, which the kernel would have to know: {error}".splitlines()[0]
    return reason


def cannot_be_told(error: Exception) -> str:
    return f"of a symbolic shape this cannot be told: {error}".splitlines()[0]
