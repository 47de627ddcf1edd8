"""`kernel`: what takes it runs once with the kernels that are installed and once with none, by reference.
`some_kernel`: where none is installed the references stand in for them, so that programs are rewritten all the same."""

import collections
import math
import os
import pathlib
import re
import subprocess
import sys
import zlib

import jax
import pytest

from jaxfuse import jitted
from jaxfuse.ops.stage import Kernel, Stage
from jaxfuse.runtime import ffi
from jaxfuse.tuning import tuned

# Most of the suite's time is XLA's compiler; at this level it compiles several times as fast, and our kernels are not touched by it.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=1 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("KERAS_BACKEND", "jax")

SHARES = {24: 36, 12: 18, 6: 9, 1: 3}  # of a test with more cases than these, one in so many is taken; the first that fits
COSTLY = 10  # and of all that are marked so
# How a skip says what pip would not bring, or not within CI's time.
ALLOWED_SKIPS = re.compile(r"this (CPU|machine|system|jax) (has|is)|is not installed, of gigabytes")


def pytest_addoption(parser):
    parser.addoption("--complete", action="store_true", help="all cases of every test")
    parser.addoption("--share", action="store_true", help="a share of the cases also where files are named")
    parser.addoption("--no-skips", action="store_true", help="a skip is an error, but for what pip does not bring, or only by gigabytes")
    parser.addoption("--salt", default=commit(), help="chooses which share of the cases is taken; default: the commit")


def pytest_configure(config):
    """What XLA compiles is kept for the next run (`--cache-clear` forgets it), and shared by all processes of this one."""
    if hasattr(config, "cache"):
        kept = {"compilation_cache_dir": str(config.cache.mkdir("compiled")), "persistent_cache_min_compile_time_secs": 0.0}
        for name, value in kept.items():
            jax.config.update(f"jax_{name}", value)
            os.environ[f"JAX_{name.upper()}"] = str(value)


def commit() -> str:
    """The commit that is tested, so that every commit takes other cases and the same one always the same; "" without git."""
    command = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def shared(config) -> bool:
    """Whether a share of the cases of a test that has many is enough: in the whole suite in one go (no file, no -k), or where asked."""
    if hasattr(config, "workerinput"):
        return config.workerinput["shared"]
    whole = config.args_source == config.ArgsSource.TESTPATHS and not config.option.keyword
    return (whole or config.option.share) and not config.option.complete


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput |= {"shared": shared(node.config), "salt": node.config.option.salt}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return without_skip((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return without_skip((yield), collector.config)


def without_skip(report, config):
    """With --no-skips a skip fails: where everything is installed, a test that does not run tests nothing unseen."""
    if report.skipped and config.option.no_skips and not hasattr(report, "wasxfail") and not ALLOWED_SKIPS.search(report.longrepr[2]):
        report.outcome, report.longrepr = "failed", f"--no-skips: {':'.join(map(str, report.longrepr[:2]))}: {report.longrepr[2]}"
    return report


def pytest_report_header(config):
    shares = ", ".join(f"with more than {many} one in {share}" for many, share in SHARES.items())
    shares = f"of the cases of tests {shares}, of costly ones one in {COSTLY}, those of --salt {config.option.salt!r}; all: --complete"
    return shares if shared(config) else "all cases"


def pytest_collection_modifyitems(config, items):
    """The first by the checksum of their names and the salt: spread over what the cases differ in, and over time all of them."""
    if not shared(config):
        return
    salt = getattr(config, "workerinput", {}).get("salt", config.option.salt)
    cases = collections.Counter(map(table_of, items))
    pools = collections.defaultdict(list)  # by the share that is taken of them, and what they have in common
    for item in items:
        share = next((share for many, share in SHARES.items() if cases[table_of(item)] > many and not item.get_closest_marker("whole")), 1)
        is_costly = item.get_closest_marker("costly") and share < COSTLY
        pools[(COSTLY, "costly") if is_costly else (share, table_of(item))].append(item)
    taken = set()
    for (share, _), pool in pools.items():
        pool.sort(key=lambda item: zlib.crc32((salt + item.nodeid).encode()))
        taken |= set(pool[: math.ceil(len(pool) / share)])
    items[:] = [item for item in items if item in taken]


def table_of(item) -> str:
    """The test, and of one that takes several tables the table: "test_patterns.py::test_hit[conv" of "…[conv: conv+bias]"."""
    test, _, case = item.nodeid.partition("[")
    table, colon, _ = case.partition(": ")
    return test + ("[" + table) * bool(colon)


@pytest.fixture(autouse=True, scope="session")
def built_in_rules(tmp_path_factory):
    """Not those that were measured on the developer's machine, and of one instruction set, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "isa", lambda: ("avx512", "avx512_core_bf16"))
        patch.setattr(tuned, "computes_whole_vectors", lambda: True)
        patch.setenv("JAXFUSE_CACHE", str(tmp_path_factory.getbasetemp() / "no rules"))
        yield


@pytest.fixture(autouse=True)
def programs_of_its_own():
    """Two tests that fuse the same function may have changed what it is rewritten to."""
    jitted._runs.clear()


@pytest.fixture(autouse=True)
def path_as_before():
    """Commands that run in this process add the folder that they run in."""
    before = sys.path.copy()
    yield
    sys.path[:] = before


@pytest.fixture(scope="module", params=["installed", "reference"])
def kernel(request):
    if request.param == "installed":
        yield "installed"
        return
    with pytest.MonkeyPatch.context() as patch:
        _forget_compiled()
        patch.setattr(ffi, "unavailable", lambda target: "switched off by the test")
        yield "reference"
    _forget_compiled()


@pytest.fixture
def some_kernel(monkeypatch):
    def kernel(stage, config, args, platform=None):
        return Kernel("reference", None, lambda config, args, mesh_axes: stage.reference(config, *args)), ""

    if ffi.no_onednn() or any(ffi.unavailable(target) for target in ffi.TARGETS):
        monkeypatch.setattr(Stage, "kernel", kernel)


def _forget_compiled():
    """What was compiled holds the kernel that was chosen then."""
    jax.clear_caches()
