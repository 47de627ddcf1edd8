"""`retain_memory`, its environment variable, and the launcher: each in a process of its own, for it holds for a whole process."""

import pytest

from jaxfuse.runtime import ffi, memory
from processes import python as started

pytestmark = pytest.mark.skipif(not memory.is_glibc(), reason="this system has no glibc, whose malloc's settings these are")

# Temporaries of more than 32 MB, which glibc maps anew at every call; prints the page faults of ten calls, once the arena has its size.
FAULTS = """
import resource
import jax, jax.numpy as jnp

@jax.jit
def f(x):
    y, w = jax.lax.optimization_barrier(2 * x), x[:, :8]
    return y.T @ w + jax.lax.optimization_barrier(jnp.cos(y)) @ w + jax.lax.optimization_barrier(jnp.sin(y)).T @ w

x = jnp.ones((2048, 2048))
for call in range(40):
    if call == 30:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def python(*arguments, **environment):
    """It compiles what it runs: that is where threads take memory."""
    own = {memory.ENVIRONMENT: None, "MALLOC_ARENA_MAX": None, "JAX_COMPILATION_CACHE_DIR": None}
    return started(*arguments, **own | environment)


@pytest.mark.costly
def test_memory_stays_in_the_process():
    plain = python("-c", FAULTS)
    retained = python("-c", "import jaxfuse; assert jaxfuse.retain_memory() and jaxfuse.retain_memory()\n" + FAULTS)
    assert not retained.returncode, retained.stderr
    assert int(retained.stdout) < 0.3 * int(plain.stdout)


COMPUTED = "import jax; x = jax.numpy.ones((512, 512)); (x @ x).block_until_ready(); "  # by XLA's threads: to list devices may be too short


def test_too_late_is_an_error_with_the_remedy():
    code = COMPUTED + "import jaxfuse; jaxfuse.retain_memory()"
    assert "RuntimeError: retain_memory: too late" in (error := python("-c", code).stderr) and "python -m jaxfuse run script.py" in error


@pytest.mark.costly
def test_by_the_environment():
    code = "import jaxfuse, os; print(jaxfuse.runtime.memory.is_retained())"
    assert python("-c", code, JAXFUSE_RETAIN_MEMORY="1").stdout == "True\n"
    by_default = code + "; jaxfuse.runtime.memory.retain_if_asked(by_default=True); print(jaxfuse.runtime.memory.is_retained())"  # the demo
    said = {asked: python("-c", by_default, JAXFUSE_RETAIN_MEMORY=asked).stdout for asked in ("", "0", "False")}
    assert said == {"": "False\nTrue\n", "0": "False\nFalse\n", "False": "False\nFalse\n"}
    late = python("-c", COMPUTED + code, JAXFUSE_RETAIN_MEMORY="1")
    assert late.stdout == "False\n" and "RuntimeWarning: JAXFUSE_RETAIN_MEMORY: retain_memory: too late" in late.stderr


SCRIPT = """
'''A script.'''
import sys, helper, jaxfuse.runtime.memory
print(__name__, __doc__, sys.argv[1:], helper.VALUE, jaxfuse.runtime.memory.is_retained(), __file__ == sys.argv[0])
if sys.argv[1:] == ["--fail"]:
    raise ValueError("of the script")
sys.exit(len(sys.argv) - 1)
"""


@pytest.mark.costly
def test_the_launcher_is_python_to_the_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("VALUE = 7")
    script = str(tmp_path / "script.py")
    done = python("-m", "jaxfuse", "run", script, "-m", "--help")
    assert done.stdout == "__main__ A script. ['-m', '--help'] 7 True True\n" and done.returncode == 2, done.stderr
    failed = python("-m", "jaxfuse", "run", script, "--fail")
    assert failed.returncode == 1 and failed.stderr.rstrip().endswith("ValueError: of the script")
    missing = python("-m", "jaxfuse", "run", str(tmp_path / "nothing.py"))
    assert missing.returncode == 1 and "there is no file" in missing.stderr
    module = python("-m", "jaxfuse", "run", "-m", "timeit", "-n", "1", "-r", "1", "pass")
    assert module.returncode == 0 and "1 loop" in module.stdout


def test_importing_starts_no_threads():
    """The kernels are registered by the import; their threads start with the first call."""
    code = "import threading, jaxfuse, os; print(jaxfuse.runtime.memory.arenas(), len(os.listdir('/proc/self/task')))"
    arenas, threads = python("-c", code).stdout.split()
    assert (arenas, int(threads) <= 2) == ("1", True)


IDLE = """
import time
import jax, jax.numpy as jnp
from jaxfuse import ops

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

x, w = jnp.ones((16, 32, 128, 128)), jnp.ones((32, 32, 3, 3))
run = jax.jit(lambda x: ops.conv(x, w, dimension_numbers=("NCHW", "OIHW", "NCHW")).sum())
run(x).block_until_ready()
used = resident()
time.sleep(1)
kept, limit = resident(), time.monotonic() + 40
while resident() > used - 50 and time.monotonic() < limit:
    time.sleep(0.5)
print(used - kept < 50, used - resident() > 50)
"""


@pytest.mark.costly
@pytest.mark.skipif(ffi.unavailable("jaxfuse_conv_fwd") is not None, reason=str(ffi.unavailable("jaxfuse_conv_fwd")))
def test_idle_scratch_goes_back():
    """67 MB for a convolution's x and y, channels last: kept for the next call, and given back when none comes for some seconds."""
    done = python("-c", IDLE)
    assert done.stdout == "True True\n", done.stderr
