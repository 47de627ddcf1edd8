"""Where a fused kernel is worth it. "measured" asks the rules, which are measurements: those of `python -m jaxfuse bench
--tune` on this machine where there are any, else those that come with the package (`rules/`). On CUDA it goes by counted bytes."""

import functools
import math

from jaxfuse.ops.errors import one_of
from jaxfuse.runtime import platforms, private
from jaxfuse.runtime.reasons import SwitchedOff, Unprofitable, no_kernel
from jaxfuse.tuning import measured, tuned
from jaxfuse.tuning.rules import TABLE, cuda, int8, packed

POLICIES = ("measured", "always", "never")


def unprofitable(policy: str, inference: bool = False):
    """A function (op name, config, argument types, direction="forward", cost="") -> reason to leave the site alone, or "".

    `cost` is what a pattern itself knows against it: a kernel would take it, and gain nothing. In `inference` no gradient follows.
    """
    one_of(policy, POLICIES, "policy")
    return dict(measured=functools.partial(_measured, inference), always=_always, never=_never)[policy]


def packing(policy: str, config, x, w, is_dense: bool) -> packed.Packing:
    """How the constant filter w of a convolution of x, which may be a dense layer, is best laid out, by freeze's policy."""
    if platforms.current() != "cpu":
        return packed.Packing.none
    return packed.any_that_fits(config, x, w) if policy == "always" else packed.fastest(config, x, w, is_dense)


def expands(policy: str, x, activation) -> bool:
    """Whether a 1×1 convolution of x by a constant filter is computed with the depthwise one behind it, which has this activation, by
    freeze's policy."""
    return platforms.current() == "cpu" and (policy == "always" or packed.wins_expanded(x, activation))


def takes_gates(policy: str, dtype) -> bool:
    """Whether a convolution by a constant filter takes in the factors of its input's channels, by freeze's policy."""
    return platforms.current() == "cpu" and (policy == "always" or packed.packs(dtype))


def not_in_int8(policy: str, products: int) -> str:
    """Why a layer of so many products stays in its floats, where freeze is asked for int8; "": it is int8."""
    if platforms.current() != "cpu":
        return no_kernel()
    return "" if policy == "always" else int8.expects_no_gain(products)


def _always(op, config, types, direction="forward", cost="") -> str:
    return ""


def _never(op, config, types, direction="forward", cost="") -> str:
    return SwitchedOff('policy "never"')


def _measured(inference, op, config, types, direction="forward", cost="") -> str:
    platform = platforms.current()
    if platform not in ("cpu", "cuda"):
        return no_kernel()
    reason = _by_bytes(op, config, types) if platform == "cuda" else _by_rules(op, config, types, direction, inference)
    reason = reason or cost
    return Unprofitable(reason) if reason else ""


def _by_bytes(op, config, types) -> str:
    return cuda.expects_no_gain(op, TABLE[op].shape_class(config, types), config, types)


def _by_rules(op, config, types, direction: str, inference: bool) -> str:
    table = TABLE[op]
    if inference and op in ("dense", "conv") and _is_packed(op, config, types):
        return ""
    if inference and op == "global_average_pool" and packed.packs(types[0].dtype):
        return ""  # XLA's wakes threads of its own, beside ours: networks are 2 to 10 % slower with it (benchmarks/README.md)
    site = direction, str(types[0].dtype), table.shape_class(config, types), tuned.isa()
    rule = next((rule for rule in (*tuned.rules(op), *measured.rules(op)) if rule.fits(*site)), None)
    if rule is None:
        return f"{op} {direction} of {site[1]} ({site[2]}) has not been measured; python -m jaxfuse bench --tune does it"
    rule, size = rule.in_inference if inference else rule, table.size(config, types)
    if rule.smallest == math.inf:
        return f"slower than XLA at every size that was measured, up to {rule.largest} {table.unit}"
    if size < rule.smallest:
        only = ", the largest measured" if rule.smallest == rule.largest else ""
        return f"too small to gain: {size} {table.unit}, measured faster from {rule.smallest}{only}"
    return ""


def _is_packed(op, config, types) -> bool:
    """Whether freeze packs the weight of this dense layer, which may be a convolution, and is faster for it. That the weight is constant
    is taken for granted: in inference products of two activations have a batch, as attention's, or are rare."""
    x, w = types[:2]
    if op == "conv":
        rows, is_dense = private.known(x.shape[config.lhs_spec[0]]), packed.has_one_place(config, x, w)
    else:
        rows, is_dense = math.prod(private.known(n) for d, n in enumerate(x.shape) if d not in config.x_contracted), not config.x_batch
    one_dtype = str(x.dtype) == str(w.dtype) == (config.out_dtype or str(x.dtype)) and str(x.dtype) in ("float32", "bfloat16")
    return one_dtype and is_dense and packed.wins_packed(x.dtype, rows)
