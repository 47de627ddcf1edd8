"""`kernel`: what takes it runs once with the kernels that are installed and once with none, by reference.
`some_kernel`: where none is installed the references stand in for them, so that programs are rewritten all the same."""

import collections
import os
import pathlib
import subprocess
import zlib

import jax
import pytest

from jaxfuse import jitted
from jaxfuse.ops import op
from jaxfuse.runtime import ffi
from jaxfuse.tuning import tuned

# Most of the suite's time is XLA's compiler; at this level it compiles several times as fast, and our kernels are not touched by it.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=1 " + os.environ.get("XLA_FLAGS", "")

MANY, VERY_MANY = 12, 24  # cases of one test


def pytest_addoption(parser):
    parser.addoption("--complete", action="store_true", help="all cases of every test")
    parser.addoption("--share", action="store_true", help="a share of the cases also where files are named")
    parser.addoption("--salt", default=commit(), help="chooses which share of the cases is taken; default: the commit")


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


def pytest_report_header(config):
    shares = f"a third of the cases of tests with more than {MANY}, a sixth with more than {VERY_MANY}"
    return f"{shares}, those of --salt {config.option.salt!r}; all: --complete" if shared(config) else "all cases"


def pytest_collection_modifyitems(config, items):
    """By the checksum of their names and the salt: spread over what the cases differ in, and over time all of them."""
    if shared(config):
        salt = getattr(config, "workerinput", {}).get("salt", config.option.salt)
        cases = collections.Counter(item.nodeid.split("[")[0] for item in items)
        of = {name: 1 if n <= MANY else 3 if n <= VERY_MANY else 6 for name, n in cases.items()}
        items[:] = [i for i in items if zlib.crc32((salt + i.nodeid).encode()) % of[i.nodeid.split("[")[0]] == 0]


@pytest.fixture(autouse=True, scope="session")
def built_in_rules(tmp_path_factory):
    """Not those that were measured on the developer's machine, and of one instruction set, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "isa", lambda: ("avx512", "avx512_core_bf16"))
        patch.setenv("JAXFUSE_CACHE", str(tmp_path_factory.getbasetemp() / "no rules"))
        yield


@pytest.fixture(autouse=True)
def programs_of_its_own():
    """Two tests that fuse the same function may have changed what it is rewritten to."""
    jitted._runs.clear()


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
        return op.Kernel("reference", None, lambda config, args, mesh_axes: stage.reference(config, *args)), ""

    if ffi.no_onednn() or any(ffi.unavailable(target) for target in ffi.TARGETS):
        monkeypatch.setattr(op.Stage, "kernel", kernel)


def _forget_compiled():
    """What was compiled holds the kernel that was chosen then."""
    jax.clear_caches()
