"""Rules of profitability: what a table of measurements says, and what policy "measured" makes of it."""

import math

import jax
import jax.numpy as jnp
import pytest

import jaxfuse
import layers
from jaxfuse import ops
from jaxfuse.tuning import measured, policy, tuned
from jaxfuse.tuning.rules import TABLE
from jaxfuse.tuning.rules.rule import DIRECTIONS, OpRules, Point, Rule

pytestmark = pytest.mark.whole
X = jax.ShapeDtypeStruct((10, 10), jnp.float32)


def points(*rows):
    """Points from rows (size, (XLA, fused) forward, (XLA, fused) backward); the last may be left out."""
    return tuple(Point(size, xla, fused, direction) for size, *pairs in rows for direction, (xla, fused) in zip(DIRECTIONS, pairs))


def judged(monkeypatch, rules, x=X, direction="forward", shape="any", inference=False):
    table = OpRules("elements", lambda config, types: math.prod(types[0].shape), {}, lambda *_: shape)
    monkeypatch.setitem(TABLE, "op", table)
    monkeypatch.setattr(measured, "rules", lambda op: rules)
    return policy.unprofitable("measured", inference)("op", None, (x,), direction)


@pytest.mark.parametrize("rows, smallest", [
    ([(10, 2, 1), (100, 9, 3)], 0),
    ([(10, 1, 2), (100, 9, 3)], 100),
    ([(10, 2, 1), (50, 3, 4), (100, 9, 3)], 100),  # what wins below a loss does not count
    ([(10, 1, 1), (100, 9, 3)], 100),  # a draw is no win
    ([(10, 1, 2), (50, 2, 1), (100, 9, 9.4)], 50),  # and no loss
    ([(10, 1, 2), (50, 2, 1), (100, 9, 9.5)], math.inf),
    ([(10, 2, 1), (100, 3, 9)], math.inf),
    ([], math.inf)])
def test_the_smallest_size_follows_from_the_points(rows, smallest):
    assert Rule(points(*[(size, (xla, fused)) for size, xla, fused in rows])).smallest == smallest


def test_both_directions_of_a_rule_must_win():
    rule = Rule(points((10, (2, 1), (2, 4)), (100, (9, 3), (9, 3))))
    assert rule.smallest == 100


def test_in_inference_the_gradient_does_not_count(monkeypatch):
    rules = (Rule(points((10, (2, 1), (2, 4)), (1000, (9, 3), (9, 3)))),)
    assert "too small" in judged(monkeypatch, rules)
    assert judged(monkeypatch, rules, inference=True) == ""
    apart = (Rule(points((10, (1, 2))), direction="forward"),)
    assert "slower" in judged(monkeypatch, apart, inference=True)


WINS, LOSES = points((1, (2, 1))), points((500, (1, 2)))


@pytest.mark.parametrize("rules, reason", [
    ([points((50, (1, 2)), (101, (2, 1)))], "too small to gain: 100 elements, measured faster from 101, the largest measured"),
    ([points((50, (1, 2)), (100, (2, 1)))], ""),
    ([LOSES], "slower than XLA at every size that was measured, up to 500 elements"),
    ([WINS, LOSES], ""),
    ([LOSES, WINS], "slower than XLA at every size that was measured, up to 500 elements")])
def test_rules_are_read_top_down(monkeypatch, rules, reason):
    assert judged(monkeypatch, tuple(map(Rule, rules))) == reason


@pytest.mark.parametrize("narrow", [dict(dtype="bfloat16"), dict(direction="backward"), dict(shape="wide"), dict(isa="avx9000")])
def test_a_rule_speaks_for_its_own_sites_only(monkeypatch, narrow):
    assert judged(monkeypatch, (Rule(LOSES, **narrow), Rule(WINS))) == ""
    reason = judged(monkeypatch, (Rule(WINS, **narrow),))
    assert reason == "op forward of float32 (any) has not been measured; python -m jaxfuse bench --tune does it"


def test_a_rule_that_fits_in_everything(monkeypatch):
    monkeypatch.setattr(tuned, "isa", lambda: ("avx2",))
    rule = Rule(LOSES, "backward", "bfloat16", "wide", "avx2")
    narrow = dict(x=X.update(dtype=jnp.bfloat16), direction="backward", shape="wide")
    assert "slower" in judged(monkeypatch, (rule, Rule(WINS)), **narrow)


def test_platforms_without_kernels(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert judged(monkeypatch, (Rule(WINS),)) == "no kernel yet on tpu"


def test_every_op_has_rules_with_measurements():
    names = {value.OP.name for value in vars(ops).values() if hasattr(value, "OP")} | set(TABLE)
    for name in names:
        table = TABLE[name]
        assert measured.rules(name) and table.size_sweeps, name
        for rule in measured.rules(name):
            assert rule.points and rule.machine and rule.isa, f"{name} ({rule.sites}) has no measurement"
            assert rule.direction in (None, *DIRECTIONS) and rule.shape in (None, *table.size_sweeps)
            for point in rule.points:
                assert point.direction in DIRECTIONS and point.size > 0 and point.xla > 0 and point.fused > 0
        for size_sweep in table.size_sweeps.values():
            assert all(len(shapes) == len(size_sweep.shapes[0]) for shapes in size_sweep.shapes)


@pytest.mark.parametrize("op, shape", [(op, shape) for op, table in TABLE.items() for shape in table.size_sweeps])
def test_each_instruction_set_has_its_own_measurements(op, shape):
    def deciding(dtype, *isa):
        return next((rule for rule in measured.rules(op) if rule.fits("forward", dtype, shape, isa)), None)

    for dtype in ("float32", "bfloat16"):
        assert "AVX2" in deciding(dtype, "avx2", "avx2").machine
        assert "AVX-512" in deciding(dtype, "avx512", "avx512_core_bf16").machine
    if op in ("conv", "dense") and shape not in ("one channel", "scattered"):
        assert "AMX" in deciding("bfloat16", "avx512", "avx512_core_amx").machine


def test_directions_that_are_judged_apart():
    """Attention in float16, with AVX-512: forward it is worth it at every size, where a program has its gradient not at the smallest."""
    forward, backward = (
        next(rule for rule in measured.rules("attention") if rule.fits(way, "float16", "any", ("avx512", "avx512_core_bf16")))
        for way in DIRECTIONS)
    assert {p.direction for p in forward.points} == {"forward"} and {p.direction for p in backward.points} == {"backward"}
    assert 2**20 >= backward.smallest > forward.smallest == 0


OWN_LOOPS = {*TABLE} - {"conv", "dense"}
PLAIN_JAX = {"conv one channel", "conv scattered"}  # written as other programs, in which no instruction set of ours counts


@pytest.mark.parametrize("isa, dtypes, expected", [
    ((), ("float32", "bfloat16", "float16"), set()),  # no native module, as on aarch64
    (("portable", "sse41"), ("float32", "bfloat16", "float16"), set()),
    (("avx2",), ("float32", "bfloat16", "float16"), OWN_LOOPS | PLAIN_JAX | {"dense"}),  # no oneDNN
    (("avx512",), ("float32", "bfloat16"), OWN_LOOPS | PLAIN_JAX),
    (("avx512", "avx512_core"), ("bfloat16",), OWN_LOOPS | PLAIN_JAX)])
def test_what_nobody_measured_has_no_rule(isa, dtypes, expected):
    """AVX-512 without bf16 differs where oneDNN computes in bf16: convolutions and dense layers. So does a machine
    without oneDNN, but for dense layers on AVX2, which are our own loops'."""
    found = {name for op, table in TABLE.items() for shape in table.size_sweeps for dtype in dtypes for rule in measured.rules(op)
             if rule.fits("forward", dtype, shape, isa) for name in (op, f"{op} {shape}")}
    assert {name for name in found if name in TABLE} - {"conv"} | found & PLAIN_JAX == expected
    assert not {"conv full", "conv grouped", "conv dilated"} & found


def conv(x, w, groups=1):
    return jax.nn.relu(layers.conv(x, w, feature_group_count=groups))


def test_a_convolutions_size_is_its_operations(some_kernel):
    seen = []

    def spec(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    table = TABLE["conv"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TABLE, "conv", table._replace(size=lambda *a: seen.append(table.size(*a)) or 0))
        jaxfuse.explain(conv, spec(2, 8, 8, 16), spec(3, 3, 16, 32))
        jaxfuse.explain(lambda x, w: conv(x, w, 16), spec(2, 8, 8, 16), spec(3, 3, 1, 16))
    assert {2 * (2 * 8 * 8) * 9 * 16 * 32, 2 * (2 * 8 * 8) * 9 * 16} == set(seen)


def test_a_transposed_convolution_of_few_outputs_is_a_product():
    def transposed(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1,), [(1023, 1023)], lhs_dilation=(256,), dimension_numbers=("NWC", "WIO", "NWC"))

    report = jaxfuse.explain(transposed, jnp.zeros((2, 128, 513)), jnp.zeros((1024, 513, 1)))
    assert [site.kernel for site in report.fused] == ["scattered"]
    report = jaxfuse.explain(transposed, jnp.zeros((2, 128, 513)), jnp.zeros((1024, 513, 64)))
    assert [site.kernel for site in report.fused] in (["onednn"], ["native"], [])
