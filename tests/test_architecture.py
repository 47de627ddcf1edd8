"""docs/architecture.md holds: imports run one way, files stay small, names agree on every level."""

import ast
import graphlib
import importlib
import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jaxfuse"

# Which folders and files of the package each may import from, beside itself.
ALLOWED = {
    "runtime": set(),
    "program": {"runtime"},
    "analysis": {"program", "runtime"},
    "ops": {"program", "runtime"},
    "scan_pairs": {"analysis", "program"},
    "patterns": {"analysis", "ops", "program", "runtime", "scan_pairs"},
    "tuning": {"ops", "runtime"},
    "running": {"ops", "program", "runtime"},
    "report": {"program", "running", "runtime"},
    "selection": {"ops", "program", "report", "runtime"},
    "jitted": {"program", "runtime"},
    "planner": {"patterns", "program", "runtime", "scan_pairs", "selection"},
    "fuse": {"jitted", "ops", "patterns", "planner", "program", "report", "runtime", "selection", "tuning"},
    "frozen": {"analysis", "fuse", "ops", "patterns", "program", "runtime", "tuning"},
    "__init__": {"frozen", "fuse", "ops", "report", "runtime"},
    "flax": {"fuse", "program", "report"},
    "commands": {"__init__", "fuse", "report", "runtime", "selection", "tuning"},
    "__main__": {"commands", "runtime"},
}


def modules() -> dict[str, pathlib.Path]:
    """Each module by its name below the package: "ops.conv.config", "ops" for a folder's `__init__`, "" for the package's."""
    names = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts): path for path, parts in names.items()}


def unit(module: str) -> str:
    """The folder, or the file right under the package, that a module belongs to."""
    return module.split(".")[0]


def imported(path) -> set[str]:
    """Modules of the package that this one imports, at its top or anywhere in it."""
    found, known = set(), modules()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [(node.module, alias.name) for alias in node.names]
        for module, name in names:
            first, *rest = module.split(".")
            if first == "jaxfuse":
                below = ".".join(rest)
                inner = ".".join(filter(None, (below, name)))
                found.add(inner if inner in known and path != known[inner] else below or "__init__")
    return found


def test_imports_run_one_way():
    """Folders import as `ALLOWED` says, and no module imports itself by way of others."""
    imports = {module: imported(path) for module, path in modules().items()}
    wrong = [f"{module} imports {other}" for module, others in imports.items() for other in others
             if unit(other) not in ALLOWED[unit(module)] | {unit(module)}]
    assert not wrong, "docs/architecture.md forbids it"
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names a circle


def test_private_jax_lives_in_one_file():
    users = {module for module, path in modules().items() if "jax._src" in path.read_text()}
    assert users == {"runtime.private"}


def test_onednn_lives_in_one_folder():
    sources = [path for path in (ROOT / "xla_ext").rglob("*.*") if path.suffix in (".h", ".cc", ".in")]
    users = {path.parent.name for path in sources if "dnnl" in path.read_text()}
    assert users == {"onednn"}


def test_scripts_import_what_there_is():
    """Those that no test runs: what they take from the package is there."""
    imports = re.compile(r"from (jaxfuse[\w.]*) import (\w+)")
    scripts = [*ROOT.glob("*/*.sh"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("tests/*.py")]
    found = [(path.name, *match) for path in scripts for match in imports.findall(path.read_text()) if path.name != "test_architecture.py"]
    assert len(found) > 100
    for script, module, name in found:
        there = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
        assert there, f"{script}: from {module} import {name}"


def test_no_test_imports_a_test():
    """What tests share is in files of other names: to run a test is then to import it alone."""
    imports = re.compile(r"^\s*(?:from|import) (?:tests\.)?(test_\w+|conftest)", re.MULTILINE)
    found = {str(path.relative_to(ROOT)): imports.findall(path.read_text()) for path in ROOT.glob("tests/**/*.py")}
    assert len(found) > 100 and not {path: names for path, names in found.items() if names}


def test_an_op_has_one_name_on_every_level():
    """Its pattern, its op, its rules and its handlers are files or folders of one name."""
    patterns, ops, rules, handlers = (
        {path.stem for path in (ROOT / folder).iterdir()} for folder in
        ("jaxfuse/patterns", "jaxfuse/ops", "jaxfuse/tuning/rules", "xla_ext"))
    for op in ("attention", "batch_norm", "conv", "dense", "global_average_pool", "max_pool", "norm", "recurrent"):
        assert op in patterns & ops & rules & handlers


@pytest.mark.parametrize("pattern", ["jaxfuse/**/*.py", "jaxfuse/report/web/*", "xla_ext/*", "xla_ext/onednn/*", "cuda/*", "tests/**/*.py",
                                     "benchmarks/*.py"])
def test_files_are_small(pattern):
    long = {str(p.relative_to(ROOT)): n for p in ROOT.glob(pattern) if p.is_file() and (n := len(p.read_text().splitlines())) > 350}
    assert not long
