"""python tests/fuzz_ops.py [--seconds S] [--first N] [--seeds N]: random calls of `jaxfuse.ops`, against the same written out.

A seed is a group of cases, compiled as one program: an op with random sizes, dtype, activation, layout and options. Each is called
with several inputs, small and large. Value and gradients may be no further from float64 than 1.5 times what XLA's are, or 3 times
what the result moves by where each input is rounded another way, and a rounding. Where few elements decide that is a matter of chance:
a result is a difference if it is further for most of 8 other draws too, or not finite. It is printed; the exit status is then 1.
"""

import collections
import sys

import jax
import jax.numpy as jnp
import numpy as np

from cases import CHANNELS_FIRST, Case, attention, batch_norm, conv, dense, global_average_pool, max_pool, norm, recurrent
from compare import as_float64, distance, jit, pairs, value_and_gradients, with_cotangents
from fuzz_programs import seeds
from jaxfuse.ops.activations import TABLE as ACTIVATIONS

TOGETHER = 6  # cases of a program
DRAWS = 8
SCALES = (1, 30, 0.01, 1)  # of x, for each call; in the last call a third of it is 0
ROUNDING = dict(float32=1e-6, bfloat16=4e-3, float16=1e-3)


class Random(np.random.Generator):
    def among(self, *values):
        return values[self.integers(len(values))]

    def some(self, words: str) -> str:
        return " ".join(word for word in words.split() if self.random() < 0.4)

    def activation(self, alpha=True) -> dict:
        name = self.among(*[name for name, known in ACTIVATIONS.items() if alpha or not known.has_alpha])
        return {} if name == "none" else {"activation": name} | ({"alpha": 0.3} if ACTIVATIONS[name].has_alpha else {})


def of_conv(r, name):
    rank = r.among(1, 2, 2, 2, 2, 3)
    groups = r.among(1, 1, 1, 2, 4, 0)  # 0: depthwise
    channels = r.among(1, 3, 4, 8, 16, 20, 33) * (groups or 1)
    features = channels * r.among(1, 1, 2) if not groups else groups * r.among(1, 3, 8, 17)
    size = {1: 40, 2: 14, 3: 6}[rank]
    filters, dilations = [r.among(1, 1, 2, 3, 3, 5, 7) for _ in range(rank)], [r.among(1, 1, 1, 2) for _ in range(rank)]
    image = [int(r.integers(max(1, (f - 1) * d + 1), size + (f - 1) * d + 2)) for f, d in zip(filters, dilations)]
    transposed = r.random() < 0.15
    strides = [1 if transposed else r.among(1, 1, 2, 3) for _ in range(rank)]
    padding = r.among("SAME", "VALID", tuple((int(r.integers(0, 3)), int(r.integers(0, 3))) for _ in range(rank)))
    if transposed:
        padding = tuple(((f - 1) * d // 2, (f - 1) * d // 2) for f, d in zip(filters, dilations))
    options = dict(window_strides=tuple(strides), padding=padding, rhs_dilation=tuple(dilations), feature_group_count=groups or channels)
    if transposed:
        options["lhs_dilation"] = tuple(r.among(1, 2, 3) for _ in range(rank))
    x, w = (int(r.integers(1, 5)), *image, channels), (*filters, channels // (groups or channels), features)
    if rank == 2 and r.random() < 0.2:
        options["dimension_numbers"] = CHANNELS_FIRST
        x, w = (x[0], x[3], *x[1:3]), (w[3], w[2], *w[:2])
    terms = r.some("scale bias residual")
    if "residual" in terms and r.random() < 0.3 and (activation := r.activation()):
        return conv(name, x, w, terms, residual_last=True, **options, **activation)
    return conv(name, x, w, terms, **options, **r.activation())


def of_dense(r, name):
    rows = [int(r.integers(1, 40)) for _ in range(r.among(1, 1, 2))]
    inner, columns = int(r.integers(1, 300)), int(r.integers(1, 200))
    if r.random() < 0.2:
        batch = int(r.integers(1, 5))
        numbers = dict(dimension_numbers=(((2,), (1,)), ((0,), (0,))))
        return dense(name, (batch, rows[0], inner), (batch, inner, columns), r.some("residual"), **numbers, **r.activation())
    return dense(name, (*rows, inner), (inner, columns), r.some("bias residual"), **r.activation())


def of_batch_norm(r, name):
    shape = tuple(int(r.integers(2, 9)) for _ in range(r.among(1, 2, 3, 3, 3, 4))) + (int(r.integers(1, 70)),)
    return batch_norm(name, shape, r.some("residual"), epsilon=r.among(1e-5, 1e-3), **r.activation())


def of_norm(r, name):
    op = r.among("layer_norm", "rms_norm", "group_norm")
    lead = tuple(int(r.integers(1, 9)) for _ in range(r.among(1, 2, 3)))
    if op == "group_norm":
        groups = r.among(1, 2, 4, 8)
        return norm(op, name, (*lead, 3, groups * int(r.integers(2, 12))), groups=groups, **r.activation(alpha=False))
    terms = r.some("residual")
    options = dict(return_sum=True) if terms and r.random() < 0.5 else {}
    return norm(op, name, (*lead, int(r.integers(2, 400))), terms, **options, **r.activation(alpha=False))


def of_max_pool(r, name):
    rank = r.among(1, 2, 2, 3)
    window = tuple(r.among(1, 2, 3) for _ in range(rank))
    image = tuple(int(r.integers(3, 12)) for _ in range(rank))
    padding = r.among("SAME", "VALID", tuple((int(r.integers(0, w)), int(r.integers(0, w))) for w in window))
    strides = tuple(r.among(1, 2, 3) for _ in range(rank))
    return max_pool(name, (int(r.integers(1, 4)), *image, int(r.integers(1, 40))), window, strides=strides, padding=padding)


def of_global_average_pool(r, name):
    return global_average_pool(name, tuple(int(r.integers(1, n)) for n in (4, *r.among((30,), (40, 40), (9, 9, 9)), 300)))


def of_recurrent(r, name):
    op = r.among("lstm", "gru")
    sizes, hidden = tuple(int(r.integers(1, 9)) for _ in range(3)), int(r.integers(1, 50))
    options: dict = dict(reverse=bool(r.integers(2)))
    if op == "gru" and r.random() < 0.4:
        return recurrent(op, name, sizes, hidden, r.some("bias h0"), reset_after=False, **options)
    return recurrent(op, name, sizes, hidden, r.some("bias bias_n h0" if op == "gru" else "bias h0 c0"), **options)


def of_attention(r, name):
    batch, rows, keys, features = (int(r.integers(1, n)) for n in (4, 70, 90, 40))
    shared = r.among(1, 2, 3)
    heads = shared * r.among(1, 1, 2)
    mask = r.random((rows, keys)) < 0.7
    mask[:, 0] = True
    given = r.among({}, {}, dict(bias=(heads, rows, keys)), dict(mask=mask))
    return attention(name, batch, rows, keys, heads, features, of_values=int(r.integers(1, 40)), shared=shared, **given)


OPS = (of_conv, of_conv, of_conv, of_dense, of_dense, of_batch_norm, of_norm, of_max_pool, of_global_average_pool, of_recurrent,
       of_attention)


def cases_of(seed: int) -> list[tuple[Case, str]]:
    r = Random(np.random.PCG64(seed))
    return [(r.among(*OPS)(r, f"{seed}-{i}"), r.among("float32", "float32", "bfloat16", "float16")) for i in range(TOGETHER)]


def inputs(case: Case, dtype: str, call: int, draw: int):
    arrays, cotangents = with_cotangents(case, case.inputs(dtype, call + draw * len(SCALES)))
    main = "q" if case.op == "attention" else "x"
    x = arrays[main] * np.asarray(SCALES[call], arrays[main].dtype)
    if call == len(SCALES) - 1:
        x = x * np.asarray(np.random.default_rng(call).random(x.shape) < 2 / 3, x.dtype)
    return arrays | {main: x}, cotangents


def nudged(arrays):
    """In float64, each element by up to half of its last bit."""
    rng = np.random.default_rng(0)
    return as_float64(jax.tree.map(lambda a: np.float64(a) * (1 + float(jnp.finfo(a.dtype).eps) / 2 * rng.uniform(-1, 1, a.shape)), arrays))


def of_all(cases, function: str):
    """A jitted function: values and gradients of all cases."""
    return jit(lambda given: [value_and_gradients(getattr(case, function), *args) for (case, _), args in zip(cases, given)])


def by_filter(case: Case, dtype: str, arrays, gradients, shape) -> float:
    """What a filter that is rounded once more adds (docs/numbers.md); to the gradient of scale, more the more its terms cancel."""
    if dtype == "float32" or "scale" not in case.shapes:
        return 0
    if shape != case.shapes["scale"]:
        return 2e-2
    terms, sums = (np.sum(np.abs(np.asarray(arrays[name], np.float64) * np.asarray(gradients[name]))) for name in ("w", "scale"))
    return max(2e-2, 1e-3 * terms / (sums + 1e-30))


def check(seed: int) -> list[str]:
    """What differs, in words."""
    cases, found = cases_of(seed), []
    fused, plain = of_all(cases, "fused"), of_all(cases, "unfused")

    def further(call: int, draw: int) -> dict[str, tuple[float, float]]:
        """The results that are further from float64 than they may be: how far, and how far they may be."""
        given = [inputs(case, dtype, call, draw) for case, dtype in cases]
        with jax.enable_x64(True):
            exact, moved = plain(as_float64(given)), plain([nudged(args) for args in given])
        there = {}
        for (case, dtype), (arrays, _), *results in zip(cases, given, fused(given), plain(given), moved, exact):
            for number, (value, unfused, other, true) in enumerate(pairs(*results)):
                assert value.dtype == unfused.dtype, f"{case}, result {number}: {value.dtype}, unfused {unfused.dtype}"
                error = distance(value, true)
                allowed = max(1.5 * distance(unfused, true), 3 * distance(other, true)) + ROUNDING[dtype]
                allowed += by_filter(case, dtype, arrays, results[-1][1], true.shape)
                if not (error <= allowed or np.isnan(allowed)):
                    there[f"{case} {dtype}, call {call}, result {number}"] = error, allowed
        return there

    for call in range(len(SCALES)):
        first = further(call, 0)
        others = [further(call, draw) for draw in range(1, DRAWS + 1)] if first else []
        for what, (error, allowed) in first.items():
            times = sum(what in other for other in others)
            if not np.isfinite(error) or times > DRAWS / 2:
                found.append(f"{what}: {error:.1e}, allowed {allowed:.1e}; in {times} of {DRAWS} other draws")
    return found


def main() -> int:
    counts: collections.Counter = collections.Counter()
    for seed in seeds("fuzz_ops.py", __doc__):
        found = check(seed)
        counts.update(calls=TOGETHER * len(SCALES), differences=len(found))
        print(f"seed {seed}: {dict(counts)}", *found, sep="\n  ", flush=True)
        if seed % 20 == 0:
            jax.clear_caches()
    return bool(counts["differences"])


if __name__ == "__main__":
    sys.exit(main())
