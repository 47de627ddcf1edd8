"""bench --tune: what it measures, and the file that it keeps: fresh, corrupt, foreign, newer, in a folder that takes nothing."""

import json
import warnings

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxfuse
from jaxfuse import __main__
from jaxfuse.commands import doctor, tune
from jaxfuse.runtime import ffi
from jaxfuse.tuning import measured, tuned
from jaxfuse.tuning.rules import TABLE
from jaxfuse.tuning.rules.rule import DTYPES, Point, Rule

LOSES = Rule((Point(10**6, 1.0, 2.0),), machine="this machine")
X, W = jnp.ones((2, 8, 8, 16)), jnp.ones((3, 3, 16, 16))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def conv(x, w):
    return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def kept(**changes):
    """A file by which no convolution is fused, with these changes."""
    path = tuned.save({"conv": (LOSES,)}, "2026-11-21")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def ignored(path, why):
    """The convolution is fused as by the built-in rules, after one warning that says why."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert jaxfuse.explain(conv, X, W).fused
        assert jaxfuse.explain(conv, X, W).fused
    (message,) = [str(w.message) for w in caught if "jaxfuse" in str(w.message)]
    assert message.startswith(f"jaxfuse: {path} is ignored: ") and why in message
    assert message.endswith("the rules that come with jaxfuse are in force, and `python -m jaxfuse bench --tune` measures here")
    assert "built in" in said() and why in said()


def said():
    """What the doctor says of the policy, on one line."""
    words = doctor.doctor(rules=True).replace("│", " ").split()
    return " ".join(words[words.index("policy") :])


@pytest.mark.usefixtures("some_kernel")
class TestTheFile:
    def test_there_is_none(self, folder):
        assert jaxfuse.explain(conv, X, W).fused
        assert not folder.exists() and "built in; the fused kernel is used from this size on" in said()

    def test_fresh(self, folder):
        assert kept() == folder / "rules.json"
        (site,) = jaxfuse.explain(conv, X, W).skipped
        assert site.reason == "slower than XLA at every size that was measured, up to 1000000 operations"
        assert jaxfuse.explain(conv, X, W, policy="always").fused
        assert f"measured on this machine, 2026-11-21: {folder}" in said().replace("cache /", "cache/")
        assert "never, up to 1000000 operations; this machine" in said()

    def test_a_rule_that_is_not_in_it_stays_built_in(self):
        kept()
        assert jaxfuse.explain(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"), X).fused

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 1}', b"\xff\xfe\x00"])
    def test_corrupt(self, text):
        path = kept()
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        ignored(path, "it cannot be read")

    @pytest.mark.parametrize("rules", [
        *({"conv": [LOSES._asdict() | {"points": points}]} for points in (
            [[1, 2]], [["1", 2, 3]], [[1, float("nan"), 2]], [[1, 0, 2]], [[1, 2, 3, "sideways"]], 7)),
        {"conv": [{"points": [], "colour": "red"}]}, {"conv": 3}, ["conv"], None])
    def test_corrupt_rules(self, rules):
        ignored(kept(rules=rules), "it cannot be read")

    @pytest.mark.parametrize("what", ["cpu", "isa", "threads", "jaxlib", "jaxfuse"])
    def test_foreign(self, what):
        ignored(kept(**{what: "other"}), f"it was measured with {what} other, and here it is {tuned.identity()[what]}")

    def test_newer(self):
        ignored(kept(format=tuned.FORMAT + 1), "it is of format 2, and this version of jaxfuse reads format 1")

    def test_a_folder_in_its_place(self, folder):
        (folder / "rules.json").mkdir(parents=True)
        ignored(folder / "rules.json", "it cannot be read (IsADirectoryError")


def test_a_folder_that_takes_nothing_is_noticed_before_measuring(folder, monkeypatch, capsys):
    folder.write_text("a file, where the folder should be")
    monkeypatch.setattr(tune, "measure", None)
    assert __main__.main(["bench", "--tune"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "the rules cannot be kept in" in out and "JAXFUSE_CACHE names another folder" in out


def test_what_was_measured_is_kept(folder, monkeypatch, capsys):
    monkeypatch.setattr(tune, "measure", lambda *_: {"conv": (LOSES,)})
    assert __main__.main(["bench", "--tune"]) == 0
    assert tuned.read().rules == {"conv": (LOSES,)} and not tuned.read().ignored
    assert [path.name for path in folder.iterdir()] == ["rules.json"]


def test_quick_measures_and_keeps_nothing(folder, monkeypatch, capsys):
    monkeypatch.setattr(tune, "TABLE", {"max_pool": TABLE["max_pool"]})
    assert __main__.main(["bench", "--tune", "--quick"]) == 0
    assert "measured here" in capsys.readouterr().out and not folder.exists()


def test_other_options_are_refused(capsys):
    assert __main__.main(["bench", "--tune", "--torch"]) == 1
    assert "bench --tune takes no option but --quick, not --torch" in capsys.readouterr().err


@pytest.mark.usefixtures("some_kernel")
@pytest.mark.parametrize("op, shape", [(op, shape) for op, table in TABLE.items() for shape in table.size_sweeps])
def test_every_size_of_every_sweep_is_a_site_of_its_op(op, shape):
    """In its shape class, growing, and giving x's shape and dtype again."""
    table, sizes = TABLE[op], []
    for shapes in table.size_sweeps[shape].shapes:
        for dtype in DTYPES:
            arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in tune.arguments(shapes, dtype)]
            y = jax.eval_shape(table.size_sweeps[shape].program, *arguments)
            assert (y.shape, y.dtype) == (arguments[0].shape, arguments[0].dtype)
            found = tune.sites(op, table.size_sweeps[shape].program, arguments)
            assert {kind for kind, _ in found} == {shape}, "the program's sites are of another class"
            sizes.append(max(size for _, size in found))
    assert sizes == sorted(sizes)
    known = {p.size for rule in measured.rules(op) if rule.shape in (None, shape) for p in rule.points}
    assert set(sizes) <= known, "sizes that no built-in rule has a point for"


def test_both_directions_are_measured(monkeypatch, some_kernel):
    monkeypatch.setattr(tune, "TABLE", {"batch_norm": TABLE["batch_norm"]})
    monkeypatch.setattr(tune, "DTYPES", ("float32",))
    (rule,) = tune.measure(tune.QUICK, Console(quiet=True))["batch_norm"]
    assert rule.direction is None and {p.direction for p in rule.points} == {"forward", "backward"}


def test_what_has_no_kernel_here_gets_no_rule(monkeypatch, kernel):
    monkeypatch.setattr(tune, "TABLE", {"max_pool": TABLE["max_pool"]})
    found = tune.measure(tune.QUICK, Console(quiet=True))
    assert bool(found["max_pool"]) == (ffi.unavailable("jaxfuse_max_pool_fwd") is None)
