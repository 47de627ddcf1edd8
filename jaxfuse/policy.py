"""Where a fused kernel is worth it. "measured" asks the rules, which are measurements: those of `python -m jaxfuse bench
--tune` on this machine where there are any, else those that come with the package (`rules/`). On CUDA it goes by counted bytes."""

import math

from jaxfuse import platforms, tuned
from jaxfuse.ops.errors import one_of
from jaxfuse.reasons import no_kernel
from jaxfuse.rules import TABLE, cuda

POLICIES = ("measured", "always", "never")


def judge(policy: str):
    """A function (op name, config, argument types, direction="forward") -> reason to leave the site alone, or ""."""
    one_of(policy, POLICIES, "policy")
    return dict(measured=_measured, always=_always, never=_never)[policy]


def _always(op, config, types, direction="forward") -> str:
    return ""


def _never(op, config, types, direction="forward") -> str:
    return 'policy "never"'


def _measured(op, config, types, direction="forward") -> str:
    table, platform = TABLE[op], platforms.current()
    if platform == "cuda":
        return cuda.judge(op, table.shape_class(config, types), config, types)
    if platform != "cpu":
        return no_kernel()
    site = direction, str(types[0].dtype), table.shape_class(config, types), tuned.isa()
    rule = next((rule for rule in (*tuned.rules(op), *table.rules) if rule.fits(*site)), None)
    if rule is None:
        return f"{op} {direction} of {site[1]} ({site[2]}) has not been measured; python -m jaxfuse bench --tune does it"
    size = table.size(config, types)
    if rule.smallest == math.inf:
        return f"slower than XLA at every size that was measured, up to {max(p.size for p in rule.points)} {table.unit}"
    if size < rule.smallest:
        return f"too small to gain: {size} {table.unit}, measured faster from {rule.smallest}"
    return ""
