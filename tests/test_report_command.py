"""python -m jaxfuse explain; what the commands say of words that they do not know."""


import jax
import jax.export
import jax.numpy as jnp
import pytest

import jaxfuse
from benchmarks import __main__ as benchmarks
from jaxfuse import __main__ as cli
from jaxfuse.report import FusionReport
from jaxfuse.runtime.reasons import Exported

PROGRAM = '''
import jax, jax.numpy as jnp

class Trainer:
    @staticmethod
    def step(x, w):
        return jax.nn.relu(x @ w)

def layer(x, w):
    return jax.nn.relu(x @ w)

example_arguments = (jnp.ones((64, 64)), jax.ShapeDtypeStruct((64, 64), jnp.float32))

def by_name():
    return dict(x=jnp.ones((32, 64)), w=jnp.ones((64, 64)))

wrong = 3
'''


@pytest.fixture
def name(tmp_path, monkeypatch, request):
    """A module of its own for each test, in the folder that the command runs in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"program_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").touch()
    (tmp_path / "folder" / "train.py").write_text(PROGRAM)
    return name


def test_a_page_is_written(name, tmp_path, capsys):
    assert cli.main(["explain", f"{name}:layer"]) == 0
    out = capsys.readouterr().out
    assert "sites fused" in out and "layer.html is written" in out
    assert "jax.nn.relu(x @ w)" in (tmp_path / "layer.html").read_text()


@pytest.mark.parametrize("target, options, rows", [
    ("{}:Trainer.step", [], 64),
    ("{}.py:layer", [], 64),
    ("{}:layer", ["--arguments", "by_name"], 32),
    ("{}:layer", ["--arguments", "{}:by_name"], 32),
])
def test_functions_and_arguments_are_found(name, tmp_path, target, options, rows):
    options = [option.format(name) for option in options]
    assert cli.main(["explain", target.format(name), "--out", "found.json", "--policy", "always", *options]) == 0
    report = FusionReport.from_json((tmp_path / "found.json").read_text())
    (site,) = (*report.fused, *report.skipped)
    assert site.shapes[0] == (rows, 64) and report.program.policy == "always"


def test_an_exported_program(name, tmp_path, capsys):
    """And what else is in the program around it is found as ever."""
    fused = jaxfuse.fuse(lambda x, w: jax.nn.relu(x @ w), policy="always")
    program = jax.export.export(jax.jit(fused))(jnp.ones((64, 64)), jnp.ones((64, 64)))
    (tmp_path / "program").write_bytes(program.serialize())
    with (tmp_path / f"{name}.py").open("a") as file:
        file.write("""
loaded = jax.export.deserialize(bytearray(open("program", "rb").read()))

def network(x, w):
    return jax.nn.relu(loaded.call(x, w) @ w)
""")
    assert cli.main(["explain", f"{name}:loaded"]) == 0
    out = capsys.readouterr().out
    assert "exported before" in out and ("jaxfuse_dense_fwd_v1" in out) == ("jaxfuse_dense_fwd_v1" in program.mlir_module())
    assert cli.main(["explain", f"{name}:network", "--out", "found.json", "--policy", "always"]) == 0
    report = FusionReport.from_json((tmp_path / "found.json").read_text())
    (left,) = [site for site in report.skipped if isinstance(site.reason, Exported)]
    assert left.pattern == "exported program" and "was exported before" in left.reason
    assert [site.pattern for site in report.sites if site is not left] == ["dense+relu"]


@pytest.mark.parametrize("arguments, words", [
    (["layer"], "names no function"),
    (["{}:missing"], "has no missing"),
    (["no_such_module_here:f"], "there is no module no_such_module_here"),
    (["nowhere.py:f"], "there is no file nowhere.py"),
    (["{}:layer", "--arguments", "wrong"], "is a int: expected a tuple"),
    (["{}:layr"], "did you mean layer?"),
    (["{}:jaxe"], "it has Trainer, layer, by_name"),
    (["{}.yp:layer"], "did you mean {}.py?"),
    (["{}s:layer"], "did you mean {}?"),
    (["folder.trian:layer"], "did you mean folder.train?"),
    (["fodler.train:layer"], "did you mean folder.train?"),
    (["folder/trian:layer"], "did you mean folder/train.py?"),
    (["far:layer"], "nor among the installed packages\n"),
    (["{}:layer", "--arguments", "example_argumens"], "did you mean example_arguments?"),
    (["{}:wrong.name"], "has no wrong.name"),
    (["./{}s.py:layer"], "did you mean {}.py?"),
    (["{}:layer", "--policy", "alway"], "did you mean 'always'?"),
    (["{}:layer", "--out", "x.pdf"], "a report is saved as .html, .svg, .json"),
    (["{}:layer", "--out", "nowhere/x.html"], "there is no folder nowhere"),
    (["{}:layer", "--platform", "abacus"], "abacus"),
])
def test_what_is_wrong_is_said(name, capsys, arguments, words):
    assert cli.main(["explain", *(argument.format(name) for argument in arguments)]) == 1
    assert words.format(name) in capsys.readouterr().err


@pytest.mark.parametrize("arguments, words", [
    (["docter"], "did you mean doctor?"),
    (["demo", "--quik"], "did you mean --quick?"),
    (["doctor", "--zzz"], "unrecognized arguments: --zzz"),
    (["run", "scrip.py"], "did you mean script.py?"),
    (["run", "-m", "scirpt"], "did you mean script?"),
    (["bench", "--tune", "--qick"], "takes no option but --quick, not --qick; did you mean --quick?"),
    (["bench", "--qick", "--tune"], "did you mean --quick?"),
])
def test_a_misspelt_word_is_answered_with_the_right_one(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.memory, "retain_memory", lambda: True)
    (tmp_path / "script.py").write_text("")
    try:
        assert cli.main(arguments) == 1
    except SystemExit as end:
        assert end.code == 2
    said = capsys.readouterr().err
    assert words in said and said.count("did you mean") == words.count("did you mean")


@pytest.mark.parametrize("arguments, words", [
    (["--quik"], "unrecognized arguments: --quik; did you mean --quick?"),
    (["--peers", "xla,toch"], "no peer is named 'toch'; did you mean torch?"),
    (["--peers", "me"], "no peer is named 'me'; there are jaxfuse, frozen"),
    (["--allocator", "tuend"], "did you mean tuned?"),
    (["--tun"], "write python -m jaxfuse bench --tune"),
    (["--tuen"], "did you mean --tune?"),
    (["--readme", "far"], "there is no file far; results are kept in benchmarks/results"),
    (["--readme", "reslut.json"], "did you mean result.json?"),
])
def test_a_misspelt_word_of_a_benchmark(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "result.json").touch()
    with pytest.raises(SystemExit, match="2"):
        benchmarks.main(arguments)
    assert words in capsys.readouterr().err


def test_help_is_a_page(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    for words in ("fast = jaxfuse.fuse(fn)", "first steps:", "when something is wrong:", "demo", "run", "explain", "bisect", "bench",
                  "doctor"):
        assert words in said
