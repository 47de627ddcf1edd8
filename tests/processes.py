"""Python in a process of its own, for what a process reads once: its devices, its instruction set, its environment."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
PATHS = os.pathsep.join([str(ROOT), str(HERE), *sys.path])


def python(*arguments, timeout: float = 600, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """`python *arguments`, which finds what this process finds and the tests' own modules; a variable that is None is not there."""
    everything = os.environ | dict(PYTHONPATH=PATHS, JAX_PLATFORMS="cpu") | environment
    given = {name: value for name, value in everything.items() if value is not None}
    return subprocess.run([sys.executable, *map(str, arguments)], env=given, capture_output=True, text=True, timeout=timeout)


def printed_by(*arguments, timeout: float = 600, **environment: str | None) -> str:
    done = python(*arguments, timeout=timeout, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def printed_at(level: str, *arguments, **environment: str | None) -> str:
    """With the loops of this instruction set, which a process chooses once; the test is skipped where the processor lacks it."""
    done = python(*arguments, JAXFUSE_SIMD=level, timeout=900, **environment)
    words = f'JAXFUSE_SIMD is "{level}", expected'  # the module's own for a level that the processor lacks
    refused = [line for line in done.stderr.splitlines() if words in line and "and this CPU has" in line]
    if done.returncode and refused:
        pytest.skip(refused[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def on_devices(script: str, devices: int = 4) -> str:
    """What a file prints, run as a script on so many simulated devices of the CPU; compiled without optimisation."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
    return printed_by(script, XLA_FLAGS=flags)
