"""README and docs/: the snippets run as they stand, links lead somewhere, and every page is part of the site.

The site itself is built by `python -m tools.docs`, where a warning is an error.
"""

import importlib.util
import json
import re
import types

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn, nnx

import jaxfuse.flax.linen
import jaxfuse.flax.nnx
from benchmarks import readme
from compare import same
from processes import ROOT, python

X, W = jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 3))


def network(w, x):
    return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def train_step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: network(w, x).mean())(w)
    return w - 0.1 * gradient, loss


ANY = dict(jaxfuse=jaxfuse, fn=network, args=(W, X), train_step=train_step, x=X, w=W, bias=jnp.ones(3), residual=X)

DOCS = ROOT / "docs"
OF_THE_SITE = sorted(DOCS.rglob("*.md"))
TEXTS = {str(path.relative_to(ROOT)): path.read_text()
         for path in (*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "xla_ext/README", "xla_ext/KERNELS",
                                                         "cuda/README", "benchmarks/README")), *OF_THE_SITE)}
SNIPPETS = {page: snippets for page, text in TEXTS.items() if (snippets := re.findall(r"```python\n(.*?)```", text, re.DOTALL))}
OPS = ("conv", "dense", "batch_norm", "norm", "attention", "lstm", "gru", "max_pool", "global_average_pool", "optimizer")
ORDER = ["Meaning", "Shapes", "Dtypes", "Kernels", "Limits", "Figures"]


def test_pages_with_snippets_are_found():
    assert {"README.md", *(f"docs/{name}.md" for name in (
        "deployment", "flax", "gpu", "index", "memory", "report", "training", "tutorial"))} <= {*SNIPPETS}


@pytest.mark.parametrize("page", SNIPPETS)
def test_snippets(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # for the files that they write
    monkeypatch.setattr(jaxfuse, "retain_memory", lambda: True)  # this process has computed already
    namespace = made_by(page)
    assert "cannot be traced" not in capsys.readouterr().out  # as a report says it, which raises nothing
    for name, arguments in (("Block", [True]), ("Head", [])):
        if name in namespace:
            layer = namespace[name]()
            assert isinstance(layer, nn.Module) and layer.init_with_output(jax.random.key(0), X, *arguments)[0].shape[:3] == X.shape[:3]


def made_by(page: str) -> dict:
    """The names that the page's snippets have bound, with those that they take for granted."""
    namespace = vars(types.ModuleType("snippets")) | ANY | {"model": nnx.Conv(3, 3, (3, 3), rngs=nnx.Rngs(0))}
    for snippet in SNIPPETS[page]:
        exec(compile(snippet, page, "exec"), namespace)
    return namespace


def test_what_the_readme_makes_computes_the_same(some_kernel, capsys):
    made, args = made_by("README.md"), (W, X)
    assert "conv" in capsys.readouterr().out
    same(made["fast"](*args), network(*args))
    same(made["step"](*args), train_step(*args))
    same(made["frozen"](*args[1:]), network(*args))


def test_python_stands_where_it_is_run():
    """An indented block is for the shell."""
    indented = re.compile(r"^ {4}(import \w|from \w+ import |\w+ = |[\w.]+\(|def |class )", re.MULTILINE)
    assert indented.search("    import jaxfuse") and indented.search("    jaxfuse.explain(fn)") and not indented.search("    python -m x")
    prose = {page: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for page, text in TEXTS.items()}
    assert not [(page, found[0]) for page, text in prose.items() if (found := indented.search(text))]


def _anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(page: str, text: str) -> list[str]:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if re.match(r"https?:", link):
            continue
        if not path.exists() or anchor and anchor not in _anchors(path.read_text()):
            found.append(link)
    return found


def test_links_lead_somewhere():
    assert not {page: broken for page, text in TEXTS.items() if (broken := _broken_links(page, text))}


def test_a_broken_link_is_seen():
    text = "# One\n[there](numbers.md#denormals) [gone](nowhere.md) [no heading](numbers.md#nowhere) [here](#one) [not](#two)"
    assert _broken_links("docs/page.md", text.replace("(#one)", "(numbers.md)").replace("(#two)", "(numbers.md#two)")) == [
        "nowhere.md", "numbers.md#nowhere", "numbers.md#two"]


def test_every_page_is_part_of_the_site():
    listed = set()
    for path in OF_THE_SITE:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(), re.DOTALL):
            listed |= {path.parent / f"{line}.md" for line in block.splitlines() if line and not line.startswith(":")}
    assert listed | {DOCS / "index.md"} == set(OF_THE_SITE)


def test_a_page_of_every_op_in_one_order():
    assert {path.stem for path in (DOCS / "ops").glob("*.md")} == {*OPS, "index"}
    for name in OPS:
        assert re.findall(r"^## (.*)$", (DOCS / "ops" / f"{name}.md").read_text(), re.MULTILINE) == ORDER, name


def test_the_api_page_has_every_public_name():
    named = set(re.findall(r"jaxfuse\.(?:ops\.)?(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert set(jaxfuse.__all__) - {"ops", "reasons"} | set(jaxfuse.ops.__all__) <= named


def test_the_readmes_table_is_that_of_its_result():
    """Which it names, as `python -m benchmarks --readme` writes it."""
    shown = TEXTS["README.md"].partition(f"{readme.BEGIN}\n")[2].partition(readme.END)[0]
    (name,) = re.findall(r"`benchmarks/results/([\w.-]+)\.md`", shown)
    assert shown == readme.table(json.loads((ROOT / f"benchmarks/results/{name}.json").read_text()), name)


def test_lines_fit():
    """A table's row may be longer: it cannot be broken."""
    pages = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in OF_THE_SITE)]
    assert not [(page, line) for page in pages for line in TEXTS[page].splitlines() if len(line) > 120 and not line.startswith("|")]


def test_figures_are_of_measurements():
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    pytest.importorskip("sphinx")
    spec.loader.exec_module(figures)
    for path in OF_THE_SITE:
        for arguments in re.findall(r"```\{figures\} (.*)\n", path.read_text()):
            assert len(figures.table(*arguments.split(maxsplit=1))) > 4, (path, arguments)
    with pytest.raises(ValueError, match="nothing of 'nonsense'"):
        figures.table("nonsense")


@pytest.mark.costly
def test_the_site_is_built(tmp_path):
    """Where Sphinx is installed, as CI has it."""
    if any(importlib.util.find_spec(name) is None for name in ("sphinx", "furo", "myst_parser")):
        pytest.skip("the packages of the extra docs are not installed")
    done = python("-m", "tools.docs", "--out", tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in OF_THE_SITE} <= {
        path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
