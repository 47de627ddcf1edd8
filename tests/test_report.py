"""What a report says is true: direction, order, what is lost and what is not, and words for those who read it first."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxfuse
from jaxfuse.runtime.reasons import LeftToXla, NoKernel, SwitchedOff, Unprofitable, Untraced
from jaxfuse.tuning.rules.rule import Point, Rule
from layers import conv

X, W, B = jnp.ones((2, 16, 16, 8)), jnp.ones((3, 3, 8, 8)), jnp.ones(8)
MATRIX = jnp.ones((8, 8))


def residual_block(x, w, b):
    """Its input is read twice, so that the sum before it cannot be part of the convolution."""
    y = conv(x, w) + b
    return jax.nn.relu(conv(y, w) + b + y)


def gradient(fn, dtype=jnp.float32):
    return jax.grad(lambda *args: fn(*(a.astype(dtype) for a in args)).astype(jnp.float32).sum(), (0, 1, 2))


explained = functools.partial(jaxfuse.explain, policy="always")


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("policy", ("always", "measured", "never"))
@pytest.mark.parametrize("program", ("conv", "transposed", "dense", "loop", "ruled"))
def test_each_direction_is_told(program, policy, dtype):
    """As many rows go backward as forward, whichever of them are fused, and each after its own forward row."""
    ruled = jax.custom_vjp(lambda x, w, b: conv(x, w) + b)
    ruled.defvjp(lambda x, w, b: (conv(x, w) + b, (x, w, b)), lambda kept, g: jax.vjp(lambda *a: conv(*a[:2]) + a[2], *kept)[1](g))
    programs = dict(
        conv=lambda x, w, b: jax.nn.relu(conv(x, w) + b), dense=lambda x, w, b: jnp.tanh(x.reshape(-1, 8) @ w[0, 0] + b),
        transposed=lambda x, w, b: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b,
        loop=lambda x, w, b: lax.scan(lambda c, _: (jax.nn.relu(conv(c, w) + b), None), x, None, length=2)[0], ruled=ruled)
    report = explained(gradient(programs[program], dtype), X, W, B, policy=policy)
    rows = [(s.direction, s.pattern) for s in (*report.fused, *report.skipped)]
    assert {"forward", "backward"} == {direction for direction, _ in rows}, report.table()
    for sites in (report.fused, report.skipped):
        directions = [s.direction for s in sites]
        assert "backward" not in directions[: directions.index("forward") if "forward" in directions else 0], report.table()


def test_a_gradient_written_as_a_convolution_by_autodiff_is_backward():
    """In float64, which no kernel takes, rows of the gradient are those of the convolutions that autodiff made."""
    with jax.enable_x64(True):
        args = [jax.ShapeDtypeStruct(a.shape, jnp.float64) for a in (X, W, B)]
        report = explained(gradient(lambda x, w, b: conv(x, w) + b, jnp.float64), *args)
    assert sorted(s.direction for s in report.skipped)[:1] == ["backward"], report.table()


def test_a_fused_layer_is_not_listed_as_lost():
    report = explained(residual_block, X, W, B)
    assert not report.skipped or not any(s.kernel for s in report.fused), report.table()
    assert len(report.fused) + len(report.skipped) == 2
    text = str(report)
    assert "2 of 2 sites fused" in text or "0 of 2 sites fused" in text


def test_steps_outside_of_fused_layers_have_rows_of_their_own():
    report = explained(gradient(residual_block), X, W, B)
    if report.fused:
        assert {s.pattern for s in report.unfused_steps} >= {"conv+residual gradient"}
        assert "the layers themselves are fused" in str(report)
    assert not any("residual gradient" in s.pattern for s in report.skipped)


def test_the_overview_counts_what_the_rows_say():
    report = explained(gradient(residual_block), X, W, B)
    text, first = str(report), str(report).splitlines()[0]
    assert first.startswith(f"{len(report.fused)} of {len(report.fused) + len(report.skipped)} sites fused")
    assert all(site.pattern in text for site in (*report.fused, *report.skipped, *report.unfused_steps))


def test_many_rows_have_an_overview_and_a_table():
    def deep(x, w, b):
        for _ in range(30):
            x = jax.nn.relu(conv(x, w) + b)
        return x

    report = explained(deep, X, W, B)
    assert "All 30 rows: print(report.table())" in str(report) and len(str(report).splitlines()) < 20
    assert report.table().count("conv+bias+relu") == 30


def test_a_report_of_nothing_says_so():
    report = explained(lambda x: x + 1, X)
    assert str(report).startswith("nothing to fuse") and report.table() == str(report)


def test_modules_where_one_line_makes_several_sites():
    def layers(x, w, b):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = jax.nn.relu(conv(x, w) + b)
        return x

    assert all(name in explained(layers, X, W, B).table() for name in ("module", "first", "second"))
    assert "module" not in explained(conv, X, W).table()
    through = explained(gradient(layers), X, W, B)
    assert {s.module for s in (*through.fused, *through.skipped)} == {"first", "second"}


def test_a_layer_scale_is_no_norm():
    for fn, w in ((lambda x, w, b: x + b * (x @ w + b), MATRIX), (lambda x, w, b: x + b * (conv(x, w) + b), W)):
        report = explained(fn, X, w, B)
        assert not any("bn" in s.pattern for s in (*report.fused, *report.skipped, *report.unfused_steps)), report.table()
        if w is W:
            assert [s.pattern for s in (*report.fused, *report.skipped)] == ["conv+bias+scale+add"]
        (skipped,) = explained(fn, X, w, B, policy="never").skipped  # all of it, no kernel asked
        assert skipped.pattern == ("conv" if w is W else "dense") + "+bias+scale+add"
    normed = explained(lambda x, w, b: (conv(x, w) - b) * b + b, X, W, B)
    assert [s.pattern for s in (*normed.fused, *normed.skipped)] == ["conv+bn"]


def test_a_trace_that_fails_names_the_users_line():
    def fails(x):
        y = x + 1
        return float(y[0, 0, 0, 0])  # this line

    (site,) = explained(fails, X).skipped
    lines = open(__file__).read().splitlines()
    assert site.source.endswith(f"test_report.py:{1 + next(i for i, line in enumerate(lines) if line.endswith('# this line'))}")
    assert isinstance(site.reason, Untraced)


def test_always_knows_no_cost():
    """A residual times a number: XLA makes one pass of that, so "measured" leaves it; "always" is always."""
    rows = {p: explained(lambda x, w, b: conv(x, w) + b + x * 0.5, X, W, B, policy=p) for p in ("always", "measured")}
    if rows["always"].fused:
        assert [s.pattern for s in rows["always"].fused] == ["conv+bias+add"]
        left = *rows["measured"].skipped, *rows["measured"].unfused_steps
        assert all(isinstance(s.reason, Unprofitable) for s in left) and left


def test_a_subtracted_residual_is_a_pass_unless_xla_makes_it():
    """It changes the sign where the residual is made. An array that is given, or read elsewhere, would be written once more."""
    x, w = jax.ShapeDtypeStruct((8, 56, 56, 64), "float32"), jax.ShapeDtypeStruct((3, 3, 64, 64), "float32")
    made = explained(lambda x, w, r: jax.nn.relu(conv(x, w) - jnp.tanh(r)), x, w, x, policy="measured")
    given = explained(lambda x, w, r: jax.nn.relu(conv(x, w) - r), x, w, x, policy="measured")
    if made.fused:
        assert [s.pattern for s in made.fused] == ["conv+add+relu"]
        assert "conv+add+relu" not in [s.pattern for s in given.fused]
        assert any("the residual is subtracted" in s.reason for s in (*given.skipped, *given.unfused_steps))


def test_reasons_are_types():
    assert isinstance(explained(conv, X, W, policy="never").skipped[0].reason, SwitchedOff)
    small = explained(conv, X[:1, :2, :2], W, policy="measured").skipped
    assert small and all(isinstance(s.reason, Unprofitable) or "unavailable" in s.reason for s in small)
    loss = jax.grad(lambda p: jnp.sum(jnp.sin(p[0] @ p[1])))
    update = explained(lambda p: [a - 0.1 * b for a, b in zip(p, loss(p))], [MATRIX] * 2)
    assert [type(s.reason) for s in update.sites if s.pattern == "sgd x2"] == [LeftToXla]
    (tpu,) = jaxfuse.explain(conv, X, W, platform="tpu").skipped
    assert isinstance(tpu.reason, NoKernel)


def test_the_largest_size_measured_is_said_to_be_that():
    rule = Rule((Point(4, 1.0, 2.0), Point(64, 2.0, 1.0)))
    assert rule.wins_from("steps") == "the largest measured: 64 steps"
    assert Rule((Point(4, 1.0, 2.0), Point(64, 1.0, 2.0))).wins_from("steps") == "never, up to 64 steps"
