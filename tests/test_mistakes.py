"""What a newcomer does wrong: every error says what to do."""

import os
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfuse
from jaxfuse import __main__ as cli, patterns
from jaxfuse.report import FusionReport
from processes import PATHS

X = jnp.ones((2, 8, 8, 4))
LINEN = nn.Conv(4, (3, 3))
VARIABLES = LINEN.init(jax.random.key(0), X)


class Drops(nnx.Module):
    def __init__(self):
        self.norm, self.drop = nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.drop(self.norm(x))


def looks(x, train=False):
    return x + 1 if train else x


REPORT = FusionReport((), ())
MISTAKES = {
    "pattern by the name of its layer": (lambda: jaxfuse.fuse(looks, patterns=["layer_norm"]), "did you mean 'norm'"),
    "skip by the name of its layer": (lambda: jaxfuse.fuse(looks, skip=["linear"]), "did you mean 'dense'"),
    "pattern alone": (lambda: jaxfuse.fuse(looks, patterns="conv"), r"write patterns=\('conv',\)"),
    "skip alone": (lambda: jaxfuse.fuse(looks, skip="conv"), r"write skip=\('conv',\)"),
    "platform gpu": (lambda: jaxfuse.explain(looks, X, platform="gpu"), "did you mean 'cuda'"),
    "a result": (lambda: jaxfuse.fuse(looks(X)), r"fuse\(fn\)\(\*args\), not fuse\(fn\(\*args\)\)"),
    "a result, explained": (lambda: jaxfuse.explain(looks(X)), r"write explain\(fn, \*args\), not explain\(fn\(\*args\)\)"),
    "a result, frozen": (lambda: jaxfuse.freeze(3, VARIABLES), r"jaxfuse.freeze: fn is of type int, expected a function or a module"),
    "a strict site": (lambda: jaxfuse.fuse(LINEN.apply, strict=True)(VARIABLES, X[:0]), r'skip=\["file:line"\].*strict=False.*explain\('),
    "a report in no folder": (lambda: REPORT.save("nodir/x.html"), "FusionReport.save: there is no folder nodir for x.html; make it first"),
    "a frozen function in no folder": (lambda: jaxfuse.freeze(looks).save("nodir/x", X), "Frozen.save: there is no folder nodir for x"),
    "no JSON": (lambda: FusionReport.from_json("report.json"), "found is 'report.json', expected .* of a file give its read_text"),
    "no text": (lambda: FusionReport.from_json({}), "found is of type dict.*; from_dict takes a dict"),
    "no report": (lambda: jaxfuse.diff(REPORT, 2), "report_b is of type int, expected a FusionReport"),
    "a flag that is traced": (lambda: jaxfuse.fuse(looks)(X, train=True), "static_argnames"),
    "numpy inside": (lambda: jaxfuse.fuse(lambda x: np.asarray(x) + 1)(X), "jax.numpy"),
    "a linen module": (lambda: jaxfuse.fuse(LINEN)(X), r"fuse\(model.apply\)\(variables, x\)"),
    "a linen module, frozen": (lambda: jaxfuse.freeze(LINEN)(X), r"freeze\(model.apply, variables\)"),
    "an nnx module that changes": (lambda: jaxfuse.fuse(Drops())(X), r"fuse\(lambda model, x: model\(x\)\)\(model, x\)"),
    "an nnx module in train mode, frozen": (lambda: jaxfuse.freeze(Drops())(X), "changes drop.rngs.count, norm.mean, norm.var of the"),
    "bound arguments given again": (lambda: jaxfuse.freeze(LINEN.apply, VARIABLES)(VARIABLES, X), "bound are those at 0"),
    "Flax, not imported": (lambda: jaxfuse.nnx, "import jaxfuse.flax.linen or jaxfuse.flax.nnx"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_error_says_what_to_do(mistake):
    wrong, words = MISTAKES[mistake]
    with pytest.raises(Exception) as raised:
        wrong()
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert re.search(words, said), said


def test_what_a_frozen_module_may_change():
    """A recurrent layer asks for a key, of which it makes zeros."""
    cell = nnx.RNN(nnx.LSTMCell(4, 8, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    cell.eval()
    assert jaxfuse.freeze(cell)(jnp.ones((2, 5, 4))).shape == (2, 5, 8)


def test_an_untraceable_function_is_one_sentence():
    said = str(jaxfuse.explain(looks, X, 1, 2))
    assert said.startswith("the function cannot be traced for these arguments: TypeError: looks() takes") and "\n" not in said


@pytest.mark.parametrize("option, words", [
    ("mesure", "keyword argument 'mesure'; did you mean measure?"), ("polcy", "keyword argument 'polcy'; did you mean policy?"),
    ("training", "unexpected keyword argument 'training'")])
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jaxfuse.fuse])
def test_a_misspelt_option_of_explain(wrap, option, words):
    """It goes to the function, which does not know it."""
    (site,) = jaxfuse.explain(wrap(looks), X, **{option: True}).skipped
    assert site.reason.endswith(words)


def test_a_keyword_that_the_function_takes_is_its_own():
    (site,) = jaxfuse.explain(lambda x, mesure: x + "", X, mesure=True).skipped
    assert "did you mean" not in site.reason


def test_a_misspelt_folder(tmp_path):
    (tmp_path / "reports").mkdir()
    with pytest.raises(FileNotFoundError, match="did you mean .*/reports?"):
        REPORT.save(tmp_path / "report" / "x.html")


def test_the_patterns_that_fuse_names_are_those_there_are():
    said = jaxfuse.fuse.__doc__.partition("patterns: ")[2].partition("skip: ")[0]
    assert tuple(sorted(re.findall(r'"(\w+)"', said))) == patterns.NAMES


def test_a_misspelt_file(tmp_path):
    path = tmp_path / "network.jaxfuse"
    jaxfuse.freeze(LINEN.apply, VARIABLES).save(path, X)
    with pytest.raises(FileNotFoundError, match="did you mean .*network.jaxfuse"):
        jaxfuse.load(tmp_path / "netwrok.jaxfuse")


def test_no_command_shows_the_page(capsys):
    assert not cli.main([])
    assert "first steps:" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["doctor", "--help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_early_is_no_error(command, unbuffered):
    """As `| head` does: here before the first line."""
    unread, written = os.pipe()
    os.close(unread)
    done = subprocess.run([sys.executable, "-m", "jaxfuse", command], stdout=written, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": PATHS, "PYTHONUNBUFFERED": unbuffered})
    os.close(written)
    assert not done.stderr
    assert done.returncode == cli.UNREAD or command == "--help"  # whose errors argparse swallows


PROGRAM = """
import jax, jax.numpy as jnp, jaxfuse

def untraceable(x):
    return float(x)

def check():
    pass

def wrong():
    return jnp.all(jaxfuse.fuse(lambda x: jax.nn.relu(x @ x), policy="always")(jnp.ones((4, 4))) < 0)

def layer(x):
    return x + 1

named = dict(policy=1.0)
example_arguments = (1.0, 2.0)
"""


@pytest.mark.parametrize("arguments, words", [
    (["explain", "program.py:untraceable"], "cannot be traced for these arguments: TypeError"),
    (["explain", "program.py:xyz"], "has no xyz; it has untraceable, check"),
    (["explain", ".program:layer"], "begins with a dot"),
    (["explain", "program.py:layer", "--arguments", "named"], "has the key 'policy'"),
    (["explain", "program.py:layer", "--out", "page.html"], "page.html is a folder"),
    (["explain", "copy.py:untraceable"], "cannot be traced"),
    (["explain", "broken.py:layer"], "invalid literal"),
    (["demo", "--out", "program.py"], "no folder can be made at program.py"),
    (["bisect", "program.py:check"], "nothing is fused in it"),
    (["bisect", "program.py:wrong"], "it returned False"),
    (["bisect", "program.py:named"], "program.py:named is of type dict, expected a function"),
    (["explain", "program.py:named"], "program.py:named is of type dict, expected a function"),
])
def test_a_command_that_cannot_do_it(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    files = {"program.py": PROGRAM, "broken.py": "int('seven')"} | ({"copy.py": PROGRAM} if "copy.py:untraceable" in arguments else {})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "page.html").mkdir()
    if "broken.py:layer" in arguments:  # the module's own error, with its traceback
        with pytest.raises(ValueError, match=words):
            cli.main(arguments)
        return
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert words in out + err
    assert [path.name for path in tmp_path.glob("*.html")] == ["page.html"]
