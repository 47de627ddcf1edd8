"""What `explain` says of a program, fused or not, and whether the fused program computes what it did."""

import collections

import jax
import jax.numpy as jnp

import jaxfuse
from compare import as_near_to_the_truth, jit, same
from exact import in_float64
from jaxfuse.runtime.reasons import XLA_DOES_THIS

NO_KERNEL = "no kernel yet on cpu"
FUSED = "fused"


def fuse(fn):
    return jaxfuse.fuse(fn, policy="always")


def explain(fn, *args):
    return jaxfuse.explain(fn, *args, policy="always")


def labelled(site) -> str:
    return " ".join(["backward"] * (site.direction == "backward") + [site.pattern])


def rows(fn, *args) -> list[tuple[str, str]]:
    """(pattern, reason) of every row, in program order; backward rows have "backward" before the pattern."""
    report = explain(fn, *args)
    left = [(labelled(site), site.reason) for site in (*report.skipped, *report.unfused_steps)]
    return [*[(labelled(site), FUSED) for site in report.fused], *left]


def norms(fn, *args):
    """The rows of norms; those that are not fused with the reason."""
    return [pattern if reason == FUSED else (pattern, reason) for pattern, reason in rows(fn, *args) if "norm" in pattern]


def recognised(fn, *args) -> list[str]:
    """The patterns of all rows, each of which is fused or has nothing against it but that there is no kernel."""
    found = rows(fn, *args)
    assert {reason for _, reason in found} <= {NO_KERNEL, XLA_DOES_THIS, FUSED}, found
    return [pattern for pattern, _ in found]


def patterns(fn, *args):
    """The patterns of what is fused, and (pattern, reason) of what is left."""
    return patterns_of(explain(fn, *args))


def patterns_of(report):
    left = *report.skipped, *report.unfused_steps
    return [site.pattern for site in report.fused], [(site.pattern, site.reason) for site in left]


def directions(fn, *args) -> list[str]:
    """The patterns of what is fused, sorted, the backward ones with "backward" before them."""
    return sorted(labelled(site) for site in explain(fn, *args).fused)


def sites(report, direction):
    return collections.Counter(site.pattern for site in report.fused if site.direction == direction)


def fused(fn, *args) -> list[str]:
    """The patterns of the fused sites, with what the fused function returns compared to what `fn` returns."""
    correct(fn, *args)
    return [site.pattern for site in explain(fn, *args).fused]


def counts(fn, *args) -> dict[str, int]:
    return dict(collections.Counter(recognised(fn, *args)))


def scalar(fn):
    """A loss over all that `fn` returns, with no activation at its end, of terms of one sign."""
    return lambda *args: sum(jnp.sum(2 + jnp.sin(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(fn(*args)))


def differentiated(fn, *args, inputs=None):
    """Value and gradients of a loss over `fn`, by those arguments, or by all that are of floats alone."""
    floats = [i for i, a in enumerate(args) if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(a))]
    return jax.value_and_grad(scalar(fn), inputs or tuple(floats))


def narrowest(fn, *args):
    """The narrowest type of numbers in a program: it tells what the program's own roundings may do."""
    text = str(jax.make_jaxpr(fn)(*args))
    return next((dtype for short, dtype in (("bf16[", "bfloat16"), ("f16[", "float16")) if short in text), "float32")


def correct(fn, *args, times=1.0):
    """The fused program is as near to the truth as the program itself."""
    made, plain = jit(fuse(fn))(*args), jit(fn)(*args)
    as_near_to_the_truth(made, plain, in_float64(fn, *args), narrowest=narrowest(fn, *args), times=times)


def same_as_unfused(fn, *args, times=1.0, floor=0.0):
    """In type and in numbers: for what is long to compile in float64 too, or has no meaning there."""
    same(jit(fuse(fn))(*args), jit(fn)(*args), narrowest=narrowest(fn, *args), times=times, floor=floor)


def correct_with_gradients(fn, *args, times=1.0, vmapped=False):
    """What is fused, alone and with the gradients of it; and what is fused of value and gradients, and of a vmap; all one program."""
    step, wide = differentiated(fn, *args), differentiated(fuse(fn), *args)
    items = [args, tuple(jax.tree.map(lambda a: a * 2, arg) if i == 0 else arg for i, arg in enumerate(args))] if vmapped else [args]

    def made(*items):
        first = items[0]
        batched = jax.tree.map(lambda *a: jnp.stack(a), *[item[0] for item in items])
        whole = fuse(jax.vmap(fn, (0, *[None] * (len(first) - 1))))(batched, *first[1:]) if vmapped else ()
        return fuse(fn)(*first), wide(*first), fuse(step)(*first), whole

    def known(*items):
        values = [fn(*item) for item in items]
        gradients = step(*items[0])
        whole = jax.tree.map(lambda *a: jnp.stack(a), *values) if vmapped else ()
        return values[0], gradients, gradients, whole

    exact = in_float64(known, *items)
    as_near_to_the_truth(jit(made)(*items), jit(known)(*items), exact, narrowest=narrowest(step, *args), times=times)
