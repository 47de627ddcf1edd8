"""Random programs for `fuzz.py`: steps of fuzz_steps.py, some of them around others, and how they are run."""

import argparse
import itertools
import random
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fuzz_steps import STEPS, Scope, wide

HALVES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
WRAPPERS = ("residual", "residual", "residual", "jit", "remat", "vmap", "layers", "microbatches", "cond", *HALVES, "concat", "twice",
            "custom rule", "named")
DEEPEST, LONGEST = 2, 6


def seeds(program: str, doc: str):
    """Those that the command line asks for, for as long as it says."""
    parser = argparse.ArgumentParser(f"python tests/{program}", description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=10**9, help="how many of them")
    parser.add_argument("--seconds", type=float, default=600, help="for how long (default: %(default)s)")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    return itertools.takewhile(lambda _: time.monotonic() <= end, range(arguments.first, arguments.first + arguments.seeds))


class Step(NamedTuple):
    name: str
    key: int
    options: dict
    body: tuple["Step", ...] = ()


class Program(NamedTuple):
    """`shape` is that of the input, channels last; `first` says that the program has them first."""

    shape: tuple[int, ...]
    first: bool
    frozen: int  # of the parameters every so manieth is not trained; 0: all are
    steps: tuple[Step, ...]


def random_program(seed: int) -> Program:
    rng = random.Random(seed)
    rank = rng.choice((4, 4, 4, 4, 3, 3, 2))
    spatial = {4: (rng.choice((5, 8)),) * 2, 3: (rng.choice((4, 7)),), 2: ()}[rank]
    suited = {4: ("conv", "conv", "conv", "norm", "norm", "norm", "activation", "activation", "activation", "pool", "reshape"),
              3: ("dense", "dense", "norm", "norm", "activation", "attention", "recurrent"),
              2: ("dense", "dense", "norm", "activation", "activation")}[rank] + ("arithmetic", "read_again", "dense")

    def steps(depth: int, longest: int) -> tuple[Step, ...]:
        return tuple(one(depth) for _ in range(rng.randint(1 if depth else 2, longest)))

    def one(depth: int) -> Step:
        key = rng.randrange(10**6)
        if depth < DEEPEST and rng.random() < 0.3:
            return Step(rng.choice(WRAPPERS), key, {"choice": rng.randrange(4)}, steps(depth + 1, LONGEST - 2 - depth))
        name = rng.choice(suited)
        return Step(name, key, {option: rng.choice(choices) for option, choices in STEPS[name][1].items()})

    shape = (rng.choice((2, 4)), *spatial, rng.choice((3, 4, 8, 16)))
    return Program(shape, rank == 4 and rng.random() < 0.35, rng.choice((0, 0, 0, 2, 3)), steps(0, LONGEST))


def run(scope: Scope, steps, x):
    for name, key, options, body in steps:
        if name in STEPS:
            x = STEPS[name][0](scope, x, key, **options)
        else:
            x = around(scope, name, key, options["choice"], body, x)
    return x


def around(scope: Scope, name: str, key: int, choice: int, body, x):
    """`x` after a body with something around it."""
    inner = scope.inner()

    def plain(v):
        return run(inner, body, v)

    def apart(v, **changes):
        """(result, extras summed) with nothing kept outside, as what traces the body needs it."""
        own = scope.inner(prefix=scope.prefix + "'", **changes)
        result = run(own, body, v)
        return result, sum((jnp.mean(wide(extra)) for extra in own.extras), jnp.float32(0))

    if name in ("residual", "concat", "twice"):
        y = plain(x)
        scope.extras += inner.extras
        if name == "twice":
            return y + run(scope, body, y) if y.shape == x.shape else y
        if y.shape == x.shape and name == "residual":
            return (x + y, y + x, jax.nn.relu(y + x), x + 0.5 * y)[choice]
        axis = scope.axis(y)
        if y.ndim == x.ndim and y.shape[:axis] == x.shape[:axis] and y.shape[axis + 1 :] == x.shape[axis + 1 :]:
            return jnp.concatenate([x, y], scope.axis(y))
        return y
    if name in HALVES:  # in float64, which is there to say what is exact, nothing is rounded
        y = plain(x if x.dtype == jnp.float64 else x.astype(HALVES[name]))
        scope.extras += inner.extras
        return wide(y)
    if name == "named":
        with jax.named_scope("named"):
            y = plain(x)
        scope.extras += inner.extras
        return y
    if name == "vmap" and not scope.mapped and not scope.initialising:
        y, extras = jax.vmap(lambda v: apart(v, mapped=True), axis_name="batch")(x)
    elif name == "layers" and jax.eval_shape(lambda v: apart(v, initialising=True, params={}), x)[0].shape == x.shape:
        y, extras = _layers(scope, 2 + choice % 2, body, x)
    elif name == "microbatches" and not scope.mapped and x.shape[0] % 2 == 0 and not scope.initialising:
        y, extras = lax.map(apart, x.reshape(2, -1, *x.shape[1:]))
        y = y.reshape(-1, *y.shape[2:])
    elif name == "cond" and jax.eval_shape(lambda v: apart(v, initialising=True, params={}), x)[0] == jax.typeof(x):
        if scope.initialising:
            return apart(x)[0]
        y, extras = lax.cond(jnp.sum(x) > -1e9, apart, lambda v: (v, jnp.zeros_like(jnp.sum(wide(v)))), x)
    elif name == "remat" and not scope.initialising:
        policy = (None, None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable)[choice]
        y, extras = jax.checkpoint(apart, policy=policy)(x)
    elif name == "jit" and not scope.initialising:
        y, extras = jax.jit(apart)(x)
    elif name == "custom rule" and not scope.initialising:
        y, extras = _with_rule(apart, choice, x, scope.params)
    else:
        y, extras = apart(x, mapped=scope.mapped)
    scope.extras.append(jnp.mean(extras))
    return y


def _layers(scope: Scope, count: int, body, x):
    """Scanned over, with parameters of their own."""

    def own(i, params, initialising):
        return scope.inner(params=params, prefix=f"{scope.prefix}{i}:", initialising=initialising)

    def layer(v, params, i=0, initialising=False):
        inner = own(i, params, initialising)
        y = run(inner, body, v)
        return y.astype(v.dtype), sum((jnp.mean(wide(extra)) for extra in inner.extras), jnp.zeros_like(jnp.mean(wide(v))))

    if scope.initialising:
        for i in range(count):
            layer(x, scope.params, i, True)
        return layer(x, scope.params, 0, True)
    start = f"{scope.prefix}0:"
    names = [name[len(start):] for name in scope.params if name.startswith(start)]
    stacked = {start + name: jnp.stack([scope.params[f"{scope.prefix}{i}:{name}"] for i in range(count)]) for name in names}
    return lax.scan(lambda v, params: layer(v, params), x, stacked, length=count)


def _with_rule(function, choice: int, x, params):
    """Under a derivative rule of the user's, which is not quite that of the value."""
    @jax.custom_jvp
    def ruled(v, params):
        return function(v, params=params)

    @ruled.defjvp
    def _(primals, tangents):
        outs, moved = jax.jvp(ruled.fun, primals, tangents)
        return outs, jax.tree.map(lambda t: t * (1.5 if choice < 2 else 1), moved)

    return ruled(x, params)
