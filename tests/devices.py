"""Simulated devices, which take a fresh process: JAX counts its devices once."""

import os
import pathlib
import subprocess
import sys

import jaxfuse


def printed_by(script: str, devices: int = 4) -> str:
    """What this file prints, run as a script on so many devices of the CPU."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    paths = [str(pathlib.Path(jaxfuse.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=os.pathsep.join(paths))
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout
