"""docs/architecture.md holds: imports run one way, files stay small, names agree on every level."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jaxfuse"

# Who may import whom; what is not listed may import nothing of the package.
ALLOWED = {
    "__init__": {"ffi", "memory", "ops", "fuse", "report", "threads"},
    "__main__": {"demo", "doctor", "memory", "tune"},
    "memory": set(),
    "fuse": {"jitted", "live", "loops", "ops", "patterns", "platforms", "reasons", "policy", "report", "graph", "match", "private",
             "settings", "signature", "source", "symbolic", "versions"},
    "symbolic": {"private"},
    "settings": set(),
    "versions": set(),
    "jitted": {"platforms", "private", "signature", "stateful"},
    "stateful": {"private"},
    "signature": set(),
    "report": {"match", "private", "reasons", "running", "source"},
    "running": {"ffi", "graph", "op", "platforms", "settings"},
    "policy": {"ops", "platforms", "reasons", "rules", "tuned"},
    "rules": {"rules"},
    "tuned": {"cache", "ffi", "rules"},
    "cache": set(),
    "tune": {"fuse", "policy", "rules", "tuned"},
    "patterns": {"patterns", "graph", "layout", "canonical", "derivative", "elementwise", "forms", "loops", "moments", "rows", "batch",
                 "live", "match", "ops", "op", "private", "reasons"},
    "live": {"graph", "match"},
    "loops": {"canonical", "graph"},
    "reasons": {"platforms"},
    "platforms": set(),
    "derivative": {"canonical", "graph", "layout"},
    "forms": {"canonical", "graph", "layout", "moments"},
    "moments": {"canonical", "graph", "layout"},
    "rows": {"canonical", "elementwise", "graph", "private"},
    "match": {"canonical", "elementwise", "graph", "layout", "reasons"},
    "canonical": {"elementwise", "graph", "layout"},
    "elementwise": {"graph", "private"},
    "layout": {"graph"},
    "graph": {"private", "source"},
    "source": set(),
    "ops": {"batch", "ops", "op", "cuda", "cudnn", "elementwise", "ffi", "reasons", "settings"},
    "cudnn": {"cache", "cudnn", "ffi"},
    "op": {"batch", "ffi", "partition", "platforms", "private", "reasons", "settings", "symbolic"},
    "partition": {"batch"},
    "batch": set(),
    "private": set(),
    "ffi": {"_native", "private", "processors"},
    "processors": set(),
    "threads": {"ffi", "processors"},
    "cuda": {"ffi"},
    "doctor": {"cuda", "cudnn", "ffi", "memory", "__init__", "rules", "threads", "tuned", "versions"},
    "flax": {"flax", "fuse", "report", "signature"},
    "demo": {"__init__", "demo", "memory", "report"},
}


def modules():
    return [path for path in PACKAGE.rglob("*.py")]


def unit(path) -> str:
    """The file, or the folder under the package, that a module belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path) -> set[str]:
    """Units of the package that the module imports, at its top or anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" if node.module == "jaxfuse" else node.module for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "jaxfuse":
                known = len(parts) > 1 and (parts[1] in ALLOWED or parts[1] == "_native")
                found.add(parts[1] if known else "__init__")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    assert imported(path) <= ALLOWED[unit(path)], f"{path} imports what docs/architecture.md forbids"


def test_private_jax_lives_in_one_file():
    users = {str(p.relative_to(PACKAGE)) for p in modules() if "jax._src" in p.read_text()}
    assert users == {"private.py"}


def test_patterns_and_ops_have_the_same_names():
    ops = {p.stem for p in (PACKAGE / "ops").glob("*.py")} - {"__init__", "activations", "errors", "matrices", "naming", "piecewise"}
    ops -= {"lstm", "gru"}  # of the family `recurrent`
    ops -= {"pointwise", "scattered", "taps", "conv_channels_last", "conv_depthwise"}  # kernels of `conv`
    ops = {name for name in ops if not name.endswith(("_config", "_cudnn"))}  # a part of an op, a kernel of one
    patterns = {p.stem for p in (PACKAGE / "patterns").glob("*.py")} - {"__init__", "activations"}
    handlers = {p.stem for p in (ROOT / "xla_ext").glob("*.cc")}
    assert ops <= patterns  # a pattern without an op is recognised, and reported as having no kernel yet
    assert {name.removesuffix("_grad") for name in ops} <= handlers


@pytest.mark.parametrize("pattern", ["jaxfuse/**/*.py", "xla_ext/*", "cuda/*", "tests/*.py", "benchmarks/*.py"])
def test_files_are_small(pattern):
    long = {str(p.relative_to(ROOT)): n for p in ROOT.glob(pattern) if p.is_file() and (n := len(p.read_text().splitlines())) > 350}
    assert not long
