"""What can be made of a report: data and back, tables for Jupyter, drawings, times, differences."""

import dataclasses
import html.parser
import json
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfuse
from jaxfuse.report import FusionReport, Memory, Site, Times
from jaxfuse.runtime.reasons import Unprofitable
from layers import conv

X, W, B = jnp.ones((2, 16, 16, 8)), jnp.ones((3, 3, 8, 8)), jnp.ones(8)


def network(x, w, b):
    with jax.named_scope("first"):
        x = jax.nn.relu(conv(x, w) + b)
    with jax.named_scope("second"):
        x = jax.nn.relu(conv(x, w) + b)
    return lax.scan(lambda c, _: (jnp.tanh(conv(c, w)), None), x, None, length=2)[0]


def train_step(x, w, b):
    value, gradient = jax.value_and_grad(lambda w, b: network(x, w, b).sum(), (0, 1))(w, b)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, (w, b), gradient)


@pytest.fixture(scope="module")
def report():
    return jaxfuse.explain(train_step, X, W, B, policy="always")


@pytest.fixture(scope="module")
def unfused():
    return jaxfuse.explain(train_step, X, W, B, policy="never")


@pytest.mark.parametrize("policy", ["always", "measured", "never"])
def test_a_report_is_read_back_from_its_data(policy):
    report = jaxfuse.explain(train_step, X, W, B, policy=policy)
    again = FusionReport.from_json(report.to_json())
    assert again == report and str(again) == str(report)
    assert [type(s.reason) for s in again.sites] == [type(s.reason) for s in report.sites]
    assert json.loads(report.to_json()) == report.to_dict()


def test_data_has_the_fields_that_are_promised(report):
    found = report.to_dict()
    assert set(found) == {"schema", "fused", "skipped", "unfused_steps", "program"} and found["schema"] == 1
    assert set(found["program"]) == {"name", "platform", "policy", "folder", "equations", "memory"}
    sites = [site for part in ("fused", "skipped", "unfused_steps") for site in found[part]]
    assert sites and all(set(site) == {field.name for field in dataclasses.fields(Site)} for site in sites)
    assert found["program"]["name"] == "train_step" and found["program"]["platform"] == "cpu"


def test_times_and_symbolic_sizes_are_data_too():
    site = Site("conv", "forward", ((2, 3),), ("float32",), "a.py:1", reason=Unprofitable("small"), times=Times(None, 1.5, "why"))
    report = FusionReport((), (site,))
    assert FusionReport.from_json(report.to_json()) == report
    batch, = jax.export.symbolic_shape("b")
    symbolic = jaxfuse.explain(network, jax.ShapeDtypeStruct((batch, 16, 16, 8), jnp.float32), W, B)
    assert "b" in json.dumps(json.loads(symbolic.to_json())["program"]["equations"])
    large = jax.ShapeDtypeStruct((batch * 8192, 2048), jnp.float32)  # more bytes than 32 bits count
    symbolic = jaxfuse.explain(lambda x, w: jax.nn.gelu(x @ w), large, jax.ShapeDtypeStruct((2048, 4096), jnp.float32), policy="always")
    (site,) = FusionReport.from_json(symbolic.to_json()).fused
    assert symbolic.fused[0].bytes_saved == site.bytes_saved > 2**31


@pytest.mark.parametrize("wrong", [{}, {"schema": 0}, [], {"schema": 2, "fused": []}, {"schema": 1}])
def test_data_of_another_schema_is_refused(wrong):
    with pytest.raises(ValueError, match="report of schema 1"):
        FusionReport.from_dict(wrong)


def test_equations_and_sites_fit_together(report):
    equations = report.program.equations
    for site in report.sites:
        assert site.equations and all(0 <= i < len(equations) for i in site.equations), site
    for index, equation in enumerate(equations):
        assert all(read < index for read in equation.reads) and equation.bytes >= 0
    inner = {e.primitive for e in equations if e.parent is not None}
    assert "conv_general_dilated" in inner and {e.primitive for e in equations if e.parent is None} >= {"scan"}
    forward = next(s for s in (*report.fused, *report.skipped) if s.module == "first" and s.direction == "forward")
    assert "conv_general_dilated" in {equations[i].primitive for i in forward.equations}
    assert {equations[i].direction for i in forward.equations} == {"forward"}


def test_a_body_that_runs_in_two_places_has_rows_in_both():
    @jax.jit
    def loop(x):
        return lax.scan(lambda c, _: (jax.nn.relu(conv(c, W) + B), None), x, None, length=2)[0]

    report = jaxfuse.explain(lambda x: loop(jnp.sin(loop(x))), X, policy="always")
    sites = (*report.fused, *report.skipped)
    assert len(sites) == 2
    parents = [{report.program.equations[i].parent for i in site.equations} for site in sites]
    assert all(len(found) == 1 for found in parents) and parents[0] != parents[1]


def test_memory_is_counted_from_the_last_readers():
    """In numbers that can be followed: x of 1000 floats, y = sin(x), z = cos(y), w = y + z."""
    def fn(x):
        y = jnp.sin(x)
        z = jnp.cos(y)
        return (y + z).reshape(10, 100)

    memory = jaxfuse.explain(fn, jnp.ones(1000)).program.memory
    assert memory == Memory((8000, 12000, 16000, 8000), (8000, 12000, 16000, 8000))


def test_a_fused_program_has_less_alive():
    report = jaxfuse.explain(lambda x, w, b: jax.nn.gelu(conv(x, w) + b), X, W, B, policy="always")
    if report.fused:
        assert max(report.program.memory.after) < max(report.program.memory.before)
        assert report.program.memory.after[-1] == 4 * (X.size + W.size + B.size + X.size)  # the arguments and the result


class Tables(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_jupyter_shows_the_summary(report):
    tables = Tables()
    tables.feed(report._repr_html_())
    assert not tables.open
    text = " ".join(tables.text)
    assert f"{len(report.fused)} of" in text and all(site.pattern in text for site in report.sites)


def test_jupyter_shows_text_as_text():
    site = Site("<b>", "forward", (), (), "<script>alert(1)</script>", reason="a < b & c")
    shown = FusionReport((), (site,))._repr_html_()
    assert "<script>" not in shown and "<b>&" not in shown and "&lt;script&gt;" in shown and "a &lt; b &amp; c" in shown
    assert "nothing to fuse" in FusionReport((), ())._repr_html_()


def test_the_drawing_names_modules_and_sites(report, tmp_path):
    path = tmp_path / "report.svg"
    report.save(path)
    root = xml.etree.ElementTree.parse(path).getroot()
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"train_step", "forward pass", "backward pass"} <= set(words)
    assert all(site.pattern in words for site in (*report.fused, *report.skipped))


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz"])
def test_other_endings_are_refused(report, tmp_path, name):
    with pytest.raises(ValueError, match=r"\.html, \.svg, \.json"):
        report.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_json_is_saved(report, tmp_path):
    report.save(str(tmp_path / "r.json"))
    assert FusionReport.from_json((tmp_path / "r.json").read_text()) == report


def test_nothing_changed(report):
    assert not jaxfuse.diff(report, report) and "no site changed" in str(jaxfuse.diff(report, report))


def test_what_is_no_longer_fused_is_told(report, unfused):
    found = jaxfuse.diff(report, unfused)
    lost = [change for change in found.changes if change.what.startswith("fused → skipped")]
    assert len(lost) == len(report.fused)
    assert all(change.a.module == change.b.module and change.a.direction == change.b.direction for change in lost)
    if lost:
        assert 'policy "never"' in str(found)
        back = jaxfuse.diff(unfused, report)
        assert any(change.what.startswith("skipped → fused, by") for change in back.changes)


def test_changes_are_named_one_by_one():
    site = Site("conv+bias", "forward", ((2, 8),), ("float32",), "a.py:1", "onednn", 1000000)
    other = Site("dense", "forward", ((2, 8),), ("float32",), "a.py:9", "onednn")
    moved = dataclasses.replace(site, source="a.py:7")

    def what(**changes):
        (change,) = jaxfuse.diff(FusionReport((site,), ()), FusionReport((dataclasses.replace(site, **changes),), ())).changes
        return change.what

    assert not jaxfuse.diff(FusionReport((site,), ()), FusionReport((moved,), ()))
    assert what(kernel="native") == "kernel: onednn → native"
    assert what(pattern="conv+bias+relu") == "pattern: conv+bias → conv+bias+relu"
    assert what(bytes_saved=2000000) == "MB saved: 1.00 → 2.00"
    added = jaxfuse.diff(FusionReport((site,), ()), FusionReport((site, other), ())).changes
    assert [(change.what, change.a, change.b) for change in added] == [("only in b: fused", None, other)]
    gone = jaxfuse.diff(FusionReport((), (site, other)), FusionReport((), (other,))).changes
    assert [(change.what, change.a, change.b) for change in gone] == [("only in a: skipped", site, None)]


def test_every_site_is_measured_alone():
    def fn(x, *layers):
        for w, b in layers:
            x = jax.nn.relu(conv(x, w) + b)
        return x

    report = jaxfuse.explain(fn, X, (W, B), (W, B), policy="always", measure=True)
    for site in (*report.fused, *report.skipped):
        assert site.times.unfused > 0, site.times
        assert site.times.fused > 0 if site.kernel else site.times.fused is None and "not fused" in site.times.why
    first, second = (*report.fused, *report.skipped)
    assert first.times == second.times  # equal programs are measured once
    assert "ms unfused" in report.table() and "ms unfused" not in jaxfuse.explain(fn, X, (W, B)).table()
    assert report.to_dict()["fused" if report.fused else "skipped"][0]["times"]["unfused"] == first.times.unfused


def test_gradients_and_loops_are_measured(report):
    timed = jaxfuse.explain(train_step, X, W, B, policy="always", measure=True)
    assert len(timed.sites) == len(report.sites)
    assert all(site.times.unfused is not None or site.times.why for site in timed.sites)
    assert all(site.times.fused and site.times.unfused for site in timed.fused), [site.times for site in timed.fused]


def test_what_cannot_be_measured_says_why():
    elsewhere = jaxfuse.explain(conv, X, W, platform="tpu", measure=True)
    assert all(site.times == Times(None, None, "explained for tpu; JAX runs on cpu here") for site in elsewhere.sites)
    batch, = jax.export.symbolic_shape("b")
    symbolic = jaxfuse.explain(conv, jax.ShapeDtypeStruct((batch, 16, 16, 8), jnp.float32), W, policy="always", measure=True)
    assert all("cannot run alone" in site.times.why for site in symbolic.sites)


def test_the_measured_programs_compute_the_same():
    """Fused and unfused, a site gives the values that the program has of it."""
    from jaxfuse.planner import plan
    from jaxfuse.report.measure import _fused, _unfused
    from jaxfuse.selection import Decider
    from jaxfuse.tuning.policy import unprofitable

    found = plan(jax.make_jaxpr(lambda x, w, b: jax.nn.relu(conv(x, w) + b))(X, W, B), Decider(unprofitable("always")))
    for row in found.found:
        if hasattr(row, "emissions"):
            defines = [value for emission in row.emissions for value in emission.defines]
            parts = _unfused({node.index for node in row.nodes} | set(found.owners), defines), _fused(row.emissions)
            values = [part.run(*[np.full(v.shape, 0.5, v.dtype) for v in part.needs])[0] for part in parts]
            np.testing.assert_allclose(*values, rtol=1e-5)
