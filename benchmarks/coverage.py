"""python -m benchmarks.coverage [--small] [names...]: of the layers of other people's networks, how many are in fused sites.

Nothing is run: the networks are traced with the shapes of their parameters, at full size or, with --small, as the tests
have them. A name chooses every network that contains it.
"""

import argparse
import collections
import re

import jax
from rich.console import Console
from rich.table import Table

import jaxfuse

from .networks import NETWORKS, Network

# kind of layer -> the patterns of fused sites that hold one; a convolution with its inference norm holds one of each
SITES = {"conv": r"\bconv\b", "batch norm": r"\bbn\b", "dense": r"\bdense\b", "layer norm": r"\blayer_norm\b",
         "attention": r"^attention(?! scores)"}


def programs(network: Network) -> dict:
    """name -> (function, arguments): inference, the loss as in grad(fuse(loss)), and a step as in fuse(train_step)."""
    params, state = jax.eval_shape(network.init)

    def train_step(params, state, x, labels):
        (number, state), grads = jax.value_and_grad(network.loss, has_aux=True)(params, state, x, labels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, number

    trained = params, state, network.x, network.labels
    return {"inference": (network.apply, trained[:3]), "loss": (network.loss, trained), "train step": (train_step, trained)}


def layers(function, args) -> collections.Counter:
    """How many layers of each kind an inference program has. Every norm takes one square root: of a number per channel
    in a batch norm, of a number per position of each example in a layer norm. Every attention takes one exponential of scores."""
    *_, x = args
    counts: collections.Counter = collections.Counter()

    def count(jaxpr):
        for eqn in jaxpr.eqns:
            name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape if eqn.outvars else ()
            if name == "conv_general_dilated":
                counts["conv"] += 1
            elif name == "dot_general" and any(len(v.aval.shape) == 2 for v in eqn.invars):
                counts["dense"] += 1
            elif name in ("rsqrt", "sqrt") and shape:
                counts["layer norm" if len(shape) > 1 and shape[0] == x.shape[0] else "batch norm"] += 1
            elif name == "exp" and len(shape) == 4:
                counts["attention"] += 1
            for body in _bodies(eqn):
                count(body)

    count(jax.make_jaxpr(function)(*args).jaxpr)
    return counts


def _bodies(eqn):
    for param in eqn.params.values():
        for body in param if isinstance(param, (tuple, list)) else (param,):
            body = getattr(body, "jaxpr", body)
            if hasattr(body, "eqns"):
                yield body


def covered(report, kind: str) -> int:
    """Layers of that kind in the report's forward sites."""
    return sum(site.direction == "forward" and bool(re.search(SITES[kind], site.pattern)) for site in report.fused)


def reasons(report) -> collections.Counter:
    """(pattern, reason) of what stays, the lines of the program left out of the reasons."""
    return collections.Counter((site.pattern, re.sub(r" at \S+:\d+", "", site.reason)) for site in (*report.skipped, *report.unfused_steps))


def main():
    parser = argparse.ArgumentParser("python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--small", action="store_true", help="the small versions that the tests have")
    arguments = parser.parse_args()
    chosen = [name for name in NETWORKS if not arguments.names or any(part in name for part in arguments.names)]
    console = Console(width=max(120, Console().width))
    table = Table("network", "program", *SITES, "backward sites", title="layers in fused sites, of how many")
    left = []
    for name in chosen:
        console.print(f"tracing {name}", style="dim", highlight=False)
        calls = programs(NETWORKS[name](arguments.small))
        total = layers(*calls["inference"])
        for call, (function, args) in calls.items():
            report = jaxfuse.explain(function, *args, policy="always")
            cells = [f"{covered(report, kind)} of {total[kind]}" if total[kind] else "" for kind in SITES]
            backward = sum(site.direction == "backward" for site in report.fused)
            table.add_row(name if call == "inference" else "", call, *cells, str(backward or ""))
            left += [(name, call, *key, count) for key, count in reasons(report).items()]
    console.print(table)
    for name, call, pattern, reason, count in left:
        console.print(f"{name}, {call}: {count} x {pattern}: {reason}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
