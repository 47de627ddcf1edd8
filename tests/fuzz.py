"""python tests/fuzz.py [--seconds S] [--first N] [--seeds N]: random networks, fused against unfused.

A program is a list of random steps (fuzz_steps.py, fuzz_programs.py), some of them around others: residual branches, jit,
remat, vmap, scan, cond, casts to bfloat16 and to float16. Compared are the value, what it returns beside, and the gradients, of
`value_and_grad(fuse(loss))`, of `fuse(train_step)` and sometimes in forward mode and under vmap. What differs by more than
rounding explains, judged by a run in float64 that rounds nothing and one of slightly other arguments, or fails, is made smaller
and printed; the exit status is then 1.
"""

import collections
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

import jaxfuse
from compare import jit
from fuzz_programs import Program, Step, random_program, run, seeds
from fuzz_steps import Scope, wide


class Case:
    """A program with its parameters and input; `loss(trained, frozen, x)` is a number and what else the program gives."""

    def __init__(self, program: Program):
        self.program = program
        rng = np.random.default_rng(7)
        x = (rng.normal(size=program.shape) + 0.3).astype(np.float32)
        self.x = np.moveaxis(x, -1, 1) if program.first and x.ndim == 4 else x
        params: dict = {}
        jax.eval_shape(lambda x: run(Scope(params, program.first, True), program.steps, x), self.x)
        names = sorted(params)
        held = {n for i, n in enumerate(names) if program.frozen and i % program.frozen == 0}
        self.trained = {n: params[n] for n in names if n not in held}
        self.frozen = {n: params[n] for n in held}
        self.tolerance = max((t for half, t in TOLERANCES.items() if f"name='{half}'" in str(program.steps)), default=1e-4)

    def loss(self, trained, frozen, x):
        scope = Scope(trained | frozen, self.program.first, False)
        y = wide(run(scope, self.program.steps, x))
        readout = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        extras = sum((jnp.mean(jnp.sin(wide(extra))) for extra in scope.extras), 0.0)
        return jnp.sum(y * readout) / y.shape[0] + 0.5 * extras, (y, scope.extras)

    def step(self, trained, frozen, x):
        (number, aux), (of_params, of_x) = jax.value_and_grad(self.loss, argnums=(0, 2), has_aux=True)(trained, frozen, x)
        return number, aux, of_params, of_x

    def arguments(self, dtype=np.float32):
        return jax.tree.map(lambda a: jnp.asarray(a, dtype), (self.trained, self.frozen, self.x))

    def nudged(self, seed: int):
        """The arguments in float64, each number changed by up to a last bit of the narrowest type of the program."""
        rng, rounding = np.random.default_rng(seed), 2.0**-8 if self.tolerance in TOLERANCES.values() else 2.0**-23
        return jax.tree.map(lambda a: a * (1 + rounding * rng.uniform(-1, 1, a.shape)), self.arguments(np.float64))


def fused(function):
    return jaxfuse.fuse(function, policy="always")


def through_loss(case, wrap):
    def step(trained, frozen, x):
        grad = jax.value_and_grad(wrap(case.loss), argnums=(0, 2), has_aux=True)
        (number, aux), (of_params, of_x) = grad(trained, frozen, x)
        return number, aux, of_params, of_x

    return step


def forward_mode(case, wrap):
    def tangents(trained, frozen, x):
        return jax.jvp(lambda t, x: wrap(case.loss)(t, frozen, x), (trained, x), (jax.tree.map(jnp.cos, trained), jnp.cos(x)))

    return tangents


def vmapped(case, wrap):
    def mapped(trained, frozen, x):
        return jax.vmap(lambda x: wrap(case.step)(trained, frozen, x))(jnp.stack([x, 2 * x]))

    return mapped


TOLERANCES = {"bf16": 5e-2, "f16": 6e-3}  # a dozen roundings; of float32 programs 1e-4
WAYS = {"fuse(loss)": through_loss, "fuse(step)": lambda case, wrap: wrap(case.step), "jvp(fuse)": forward_mode, "vmap(fuse)": vmapped}


# --- judging -----------------------------------------------------------------------------------------------------


def numbers(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def excess(got: dict, expected: dict, tolerance: float) -> tuple[float, str]:
    """(error of the worst array, its name): relative to its own largest number or to a part of the largest of all,
    in units of the tolerance."""
    part = 0.1 if tolerance in TOLERANCES.values() else 1e-2  # of 1e-4: a few roundings of float32
    largest = max((np.abs(v).max(initial=0) for v in expected.values()), default=0)
    worst = 0.0, ""
    for name, right in expected.items():
        scale = max(np.abs(right).max(initial=0), part * largest, 1e-6)
        error = np.abs(got[name] - right).max(initial=0) / scale / tolerance
        worst = max(worst, (error if np.isfinite(error) else np.inf, name))
    return worst


def check(program: Program, ways) -> tuple[str, str] | None:
    """(kind, message) of what is wrong with it fused; raises `Invalid` where the program itself is at fault."""
    case = Case(program)
    unfused: dict = {}
    for way in ways:
        make = WAYS[way]
        base = "fuse(step)" if way == "fuse(loss)" else way
        if base not in unfused:
            unfused[base] = numbers(jit(make(case, lambda f: f))(*case.arguments()))
        expected = unfused[base]
        if not all(np.isfinite(v).all() for v in expected.values()):
            raise Invalid("it gives NaN or infinity")
        try:
            got = numbers(jit(make(case, fused))(*case.arguments()))
        except Exception:
            found = traceback.format_exc(limit=-8)
            try:
                jit(make(case, jax.jit))(*case.arguments())
            except Exception as error:
                raise Invalid("it fails with jax.jit in the place of fuse too") from error
            return f"{way} raises", found
        if set(got) != set(expected):
            return f"{way} returns another tree", f"{sorted(got)} instead of {sorted(expected)}"
        error, where = excess(got, expected, case.tolerance)
        if error <= 1:
            continue
        with jax.enable_x64(True):
            in_float64 = jit(make(case, lambda f: f))
            exact, *moved = (numbers(in_float64(*args)) for args in (case.arguments(np.float64), *map(case.nudged, range(4))))
        own = max(excess(other, exact, case.tolerance)[0] for other in (expected, *moved))
        error, where = excess(got, exact, case.tolerance)
        if not error <= max(1, 8 * own):
            return f"{way} differs", f"{where}: {error:.3g} against {own:.3g} unfused, in units of the tolerance"
    return None


class Invalid(Exception):
    """The program cannot be judged."""


def smaller(steps: tuple[Step, ...]):
    """The same program with one step less, or without what is around some of them."""
    for i, step in enumerate(steps):
        yield steps[:i] + steps[i + 1:]
        if step.body:
            yield steps[:i] + step.body + steps[i + 1:]
            for body in smaller(step.body):
                yield steps[:i] + (step._replace(body=body),) * bool(body) + steps[i + 1:]


def shrunk(program: Program, kind: str, ways, limit: float = 120) -> Program:
    """A smaller program that fails in the same way, found within `limit` seconds."""
    end = time.monotonic() + limit
    improved = True
    while improved and time.monotonic() < end:
        improved = False
        plainer = [program._replace(frozen=0)] * bool(program.frozen) + [program._replace(first=False)] * program.first
        for candidate in [*plainer, *[program._replace(steps=steps) for steps in smaller(program.steps) if steps]]:
            if time.monotonic() > end:
                break
            try:
                found = check(candidate, ways)
            except Exception:
                continue
            if found and found[0] == kind:
                program, improved = candidate, True
                break
    return program


def main():
    counts: collections.Counter = collections.Counter()
    for seed in seeds("fuzz.py", __doc__):
        counts[one(seed)] += 1
        print(f"seed {seed}: {dict(counts)}", flush=True)
        if sum(counts.values()) % 50 == 0:
            jax.clear_caches()
    print(dict(counts))
    sys.exit(bool(counts["failed"]))


def ways_of(seed: int) -> list[str]:
    """One of them: compiling is what takes the time."""
    return [[*["fuse(step)"] * 5, *["fuse(loss)"] * 3, "jvp(fuse)", "vmap(fuse)"][seed % 10]]


def one(seed: int) -> str:
    program, ways = random_program(seed), ways_of(seed)
    try:
        found = check(program, ways)
    except Exception as error:
        print(f"seed {seed} cannot be judged: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
        return "not judged"
    if found is None:
        return "same"
    print(f"seed {seed}: {found[0]}: {found[1]}\n  {program}", flush=True)
    program = shrunk(program, found[0], [found[0].split(" ")[0]])
    print(f"  smaller: {program}\n  {check(program, [found[0].split(' ')[0]])}", flush=True)
    return "failed"


if __name__ == "__main__":
    main()
