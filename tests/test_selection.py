"""What a user leaves out: `fuse(…, patterns=, skip=, limit=)`, and `python -m jaxfuse bisect`, which finds a wrong site by it;
counters and logging."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfuse
from jaxfuse import __main__ as cli
from jaxfuse.commands import bisect
from jaxfuse.runtime.reasons import LeftOut
from spellings import recurrent

pytestmark = pytest.mark.usefixtures("some_kernel")
random = np.random.default_rng(0)
W, V = (jnp.asarray(0.1 * random.standard_normal(s), jnp.float32) for s in ((3, 3, 8, 8), (8, 16)))  # no tanh is saturated
X = jnp.asarray(random.standard_normal((2, 6, 6, 8)), jnp.float32)


def network(x, w, v):
    for _ in range(3):
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jnp.tanh(x.reshape(-1, 8) @ v)


def loss(x, w, v):
    return jnp.sum(network(x, w, v) ** 2)


def sites(fn=network, **options):
    """(patterns that are fused, patterns that are left out), of forward and backward sites."""
    report = jaxfuse.explain(jaxfuse.fuse(fn, policy="always", **options), X, W, V, policy="always")
    left = [site.pattern for site in report.skipped if isinstance(site.reason, LeftOut)]
    return sorted(site.pattern for site in report.fused), sorted(left)


CONV, DENSE = "conv+relu", "dense+tanh"


@pytest.mark.parametrize("options, fused, left", [
    ({}, [CONV] * 3 + [DENSE], []),
    (dict(patterns=["conv"]), [CONV] * 3, [DENSE]),
    (dict(patterns=("conv", "dense")), [CONV] * 3 + [DENSE], []),
    (dict(patterns=()), [], [CONV] * 3 + [DENSE]),
    (dict(skip=["dense"]), [CONV] * 3, [DENSE]),
    (dict(skip=[CONV]), [DENSE], [CONV] * 3),
    (dict(limit=0), [], [CONV] * 3 + [DENSE]),
    (dict(limit=2), [CONV] * 2, [CONV, DENSE]),
    (dict(limit=9), [CONV] * 3 + [DENSE], []),
])
def test_what_is_left_out(options, fused, left):
    assert sites(**options) == (fused, left)
    fast = jaxfuse.fuse(network, policy="always", **options)
    assert str(jax.make_jaxpr(fast)(X, W, V)).count("jaxfuse_") == len(fused)
    np.testing.assert_allclose(fast(X, W, V), network(X, W, V), rtol=1e-4, atol=1e-5)


def test_a_site_of_a_report_and_a_line():
    report = jaxfuse.explain(network, X, W, V, policy="always")
    dense = next(site for site in report.fused if site.pattern == DENSE)
    for name in (dense, dense.place, dense.source, dense.source.rpartition("/")[2]):
        assert sites(skip=[name]) == ([CONV] * 3, [DENSE])


@pytest.mark.parametrize("limit", range(9))
def test_gradients_that_need_what_a_forward_site_would_save(limit):
    """A program with any of its sites is right, and no site waits for one that is left out."""
    step = jax.value_and_grad(loss, (1, 2))
    got = jaxfuse.fuse(step, policy="always", limit=limit)(X, W, V)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(step(X, W, V))):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-3)


def test_no_site_needs_one_that_is_skipped():
    def attend(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v) ** 2)

    operands = [jnp.asarray(random.standard_normal((2, 16, 2, 8)), jnp.float32) for _ in range(3)]
    step = jax.grad(attend, (0, 1, 2))
    report = jaxfuse.explain(step, *operands, policy="always")
    forward = [site for site in report.fused if site.direction == "forward"]
    for a, b in zip(jaxfuse.fuse(step, policy="always", skip=forward)(*operands), step(*operands)):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("options, words", [
    (dict(patterns=["cnov"]), "did you mean 'conv'"),
    (dict(skip=["dens"]), "did you mean 'dense'"),
    (dict(patterns=["bn"]), "unknown pattern 'bn'; did you mean 'batch_norm'"),
    (dict(skip=["bn inference"]), "did you mean 'batch_norm'"),
    (dict(patterns=["adam"]), "did you mean 'optimizer'"),
    (dict(patterns=["adamw+weight_decay x52"]), "did you mean 'optimizer'"),
    (dict(skip=["sgd x123"]), "did you mean 'optimizer'"),
    (dict(patterns=["exported program"]), "did you mean 'exported'"),
    (dict(patterns=["attention scores"]), "did you mean 'attention'"),
    (dict(patterns=["conv per sample"]), "did you mean 'conv'"),
    (dict(patterns=["conv+bias+relu"]), "skip takes names of sites.* unknown pattern 'conv.bias.relu'; did you mean 'conv'"),
    (dict(patterns=["add+layer_norm+gelu"]), "did you mean 'norm'"),
    (dict(patterns=["relu_grad+bias_grad"]), "skip takes names of sites"),
    (dict(skip=["chk2.py"]), "a file without a line.*'chk2.py:12'"),
    (dict(skip=["src/chk2"]), "a file without a line"),
    (dict(skip=[3]), "expected a pattern, a file:line or a Site"),
    (dict(skip=["model.py:layer"]), "expected a pattern, a file:line or a Site"),
    (dict(patterns="conv"), "expected a sequence"),
    (dict(skip="conv"), "expected a sequence"),
    (dict(limit=-1), "limit is -1"),
])
def test_what_names_no_site_is_an_error(options, words):
    with pytest.raises(ValueError, match=words):
        jaxfuse.fuse(network, **options)


def test_what_is_no_site_of_the_program_is_said():
    """A warning, by the site that is meant: nothing is left out, and a culprit would be looked for elsewhere."""
    (other,) = jaxfuse.explain(lambda x, v: jnp.tanh(x[0, 0] @ v), X, V, policy="always").fused
    line = jaxfuse.explain(network, X, W, V, policy="always").fused[0].source
    for wrong, words in (("conv+rleu", "did you mean conv.relu?"), (line[:-1], f"did you mean {line[:-1]}"), (other, "dense.tanh forward")):
        fast = jaxfuse.fuse(network, policy="always", skip=["dense", wrong])
        with pytest.warns(UserWarning, match=f"skip names .*{words}"):
            fast(X, W, V)
        with pytest.warns(UserWarning, match="no site of this program"):
            jaxfuse.explain(fast, X, W, V)


def test_strict_mode_lets_what_is_left_out_pass():
    jaxfuse.fuse(network, policy="always", strict=True, skip=["dense"])(X, W, V)


EMPTY = X[:0]  # of which no kernel makes anything


@pytest.mark.parametrize("options", [dict(skip=["conv", DENSE]), dict(patterns=["norm"]), dict(skip=["conv", "test_selection.py:{}"])])
def test_strict_mode_lets_pass_what_no_kernel_takes_too(options):
    dense = next(site for site in jaxfuse.explain(network, EMPTY, W, V).skipped if site.pattern == DENSE)
    options = {name: [each.format(dense.source.rpartition(":")[2]) for each in given] for name, given in options.items()}
    jaxfuse.fuse(network, policy="always", strict=True, **options)(EMPTY, W, V)
    with pytest.raises(jaxfuse.FusionError, match="1 sites stay unfused"):
        jaxfuse.fuse(network, policy="always", strict=True, skip=["conv"])(EMPTY, W, V)


@pytest.mark.parametrize("options", [dict(skip=["recurrent"]), dict(limit=0)])
@pytest.mark.parametrize("differentiated", [False, True])
def test_cells_of_a_loop_that_is_left_out(options, differentiated):
    """Their rows say so, and strict mode lets them pass too."""
    run = lambda w, u: recurrent.sequence(recurrent.lstm)(recurrent.XS, recurrent.H, recurrent.C, w, u)[0][0]
    fn = jax.grad(lambda *weights: jnp.sum(run(*weights) ** 2), (0, 1)) if differentiated else run
    weights = recurrent.W, recurrent.U
    report = jaxfuse.explain(jaxfuse.fuse(fn, policy="always", **options), *weights, policy="always")
    skipped = [site for site in report.skipped if site.pattern == "lstm"]
    if recurrent.NATIVE:
        assert len(skipped) > 1 and all(isinstance(site.reason, LeftOut) for site in skipped)
    jaxfuse.fuse(fn, policy="always", strict=True, **options)(*weights)


def test_what_is_not_fused_after_all_does_not_count():
    """The body of a function with a derivative of its own stays as it is, and the limit is for others."""
    layer = lambda x, v: jnp.tanh(x @ v)
    own = jax.custom_vjp(layer)
    own.defvjp(lambda x, v: (own(x, v), (x, v)), lambda kept, g: jax.vjp(layer, *kept)[1](g))
    both = lambda x, v: jax.lax.scan(lambda y, _: (layer(layer(y, v), v.T), None), own(x, v) @ v.T, None, length=2)[0]
    report = jaxfuse.explain(jaxfuse.fuse(both, policy="always", patterns=["dense"], limit=2), X, V, policy="always")
    assert [site.pattern for site in report.fused] == ["dense", DENSE] and "custom_vjp" in report.skipped[0].reason


def test_counters_and_logging(caplog):
    before = jaxfuse.counters()
    fast = jaxfuse.fuse(network, policy="always", skip=["dense"])
    with caplog.at_level("INFO", "jaxfuse"):
        fast(X, W, V), fast(X, W, V), fast(X[:1], W, V)
    after = jaxfuse.counters()
    made = after.fused.get((CONV, "forward"), 0) - before.fused.get((CONV, "forward"), 0)
    left = after.skipped.get(LeftOut.heading, 0) - before.skipped.get(LeftOut.heading, 0)
    assert (after.programs - before.programs, made, left) == (2, 6, 2)
    assert [record.getMessage().split()[0] for record in caplog.records] == ([CONV] * 3 + [DENSE]) * 2


CHECK = '''
import os
import jax, jax.numpy as jnp
import jaxfuse
from jaxfuse.ops import dense

def network(x, w, v):
    for _ in range(3):
        x = jax.nn.relu(x @ w)
    return jnp.tanh(x @ v)  # the planted one
{planted}

def check():
    x, w, v = jnp.ones((8, 8)), jnp.eye(8), jnp.eye(8)
    y = jaxfuse.fuse(network, policy="always")(x, w, v)
    {asked}

def innocent():
    jaxfuse.fuse(network, policy="always")(jnp.ones((8, 8)), jnp.eye(8), jnp.eye(8))

def hopeless():
    raise ValueError("whatever is fused")
'''
# The kernel of some sites gives another number, or ends the process.
WRONG = """
import importlib
op = importlib.import_module("jaxfuse.ops.dense").OP.forward
for i, kernel in enumerate(op.kernels):
    def run(config, args, axes, right=kernel.run):
        y, *rest = right(config, args, axes)
        if {site}:
            {happens}
        return (y, *rest)
    op.kernels = (*op.kernels[:i], kernel._replace(run=run), *op.kernels[i + 1:])
"""
TANH = 'config.activation.name == "tanh"'


@pytest.mark.costly
@pytest.mark.parametrize("happens, asked, words", [
    ("y = y + 1", "assert jnp.allclose(y, network(x, w, v), atol=1e-5), 'far'", "AssertionError: far"),
    ("y = y + 1", "return bool(jnp.allclose(y, network(x, w, v), atol=1e-5))", "it returned False"),
    ("os._exit(7)", "pass", "its process ended with code 7"),
])
def test_bisect_finds_a_planted_site(tmp_path, monkeypatch, capsys, happens, asked, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text(CHECK.format(planted=WRONG.format(site=TANH, happens=happens), asked=asked))
    assert cli.main(["bisect", "planted.py:check"]) == 0
    out = capsys.readouterr().out
    assert "dense+tanh forward" in out and "planted.py:10" in out and words in out, out
    assert out.count("passes") + out.count("fails") == 1 + 2 + 1 + 1  # runs: all, log2(4), none, for it is the first; the verdict


@pytest.mark.parametrize("number", [1, 2, 3, 7, 8, 9, 33])
def test_bisect_takes_log2_of_the_sites(monkeypatch, capsys, number):
    """Wherever the wrong site is: log2(n) runs after that with all, and one more where it is the first."""
    sites = tuple(f"dense forward float32[8, {i}] at layers.py:{i}" for i in range(1, number + 1))
    for wrong in range(number):
        monkeypatch.setattr(bisect, "_run", lambda _, limit: bisect.Run(sites[:limit], "far" if limit > wrong else ""))
        assert bisect.run("planted.py:check") == 0
        out = capsys.readouterr().out
        assert f"this site is fused:\n  {sites[wrong]}\n" in out and f"skip=['layers.py:{wrong + 1}'])" in out
        runs = len(re.findall(r"^ *\d+ +\d+ +(?:passes|fails) *$", out, re.MULTILINE))
        assert 1 + math.floor(math.log2(number)) <= runs - (wrong == 0) <= 1 + math.ceil(math.log2(number)), out


NINE = '''
import jax, jax.numpy as jnp
import jaxfuse

ROWS = 8
WEIGHTS = [jnp.full((8 + i, 9 + i), 0.1) for i in range(9)]

def network(x):
    for w in WEIGHTS:
        x = jax.nn.relu(x @ w)
    return x

def check(**options):
    x = jnp.ones((ROWS, 8))
    return bool(jnp.allclose(jaxfuse.fuse(network, policy="always", **options)(x), network(x), rtol=1e-4))

def without():
    return check(skip=[{skip!r}])
{planted}
'''


@pytest.mark.costly
@pytest.mark.parametrize("wrong, runs", [(4, 4), (0, 5)])  # the last layer is found first
def test_bisect_finds_one_of_nine_sites_of_a_line(tmp_path, monkeypatch, capsys, wrong, runs):
    """Its name leaves out that site alone."""
    monkeypatch.chdir(tmp_path)
    planted = WRONG.format(site=f"args[1].shape[0] == {8 + wrong}", happens="y = y + 1")
    (tmp_path / "nine.py").write_text(NINE.format(planted=planted, skip="dense"))
    assert cli.main(["bisect", "nine.py:check"]) == 0
    out = capsys.readouterr().out
    assert f"dense+relu forward float32[8, {8 + wrong}] " in out and out.count("passes") + out.count("fails") == runs + 1, out
    skip = re.search(r"skip=\['(.*)'\]\)$", out, re.MULTILINE)[1]
    (tmp_path / "nine.py").write_text(NINE.format(planted=planted, skip=skip))
    assert cli.main(["bisect", "nine.py:without"]) == 1
    assert "passes with all 8 sites fused" in capsys.readouterr().out


@pytest.mark.costly
@pytest.mark.parametrize("name, code, words", [
    ("innocent", 1, "there is nothing to find"), ("hopeless", 1, "fails with no site fused too: ValueError: whatever"),
    ("missing", 1, "has no missing")])
def test_bisect_without_a_culprit(tmp_path, monkeypatch, capsys, name, code, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text(CHECK.format(planted="", asked="pass"))
    assert cli.main(["bisect", f"planted.py:{name}"]) == code
    out, err = capsys.readouterr()
    assert words in out + err
