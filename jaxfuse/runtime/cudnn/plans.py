"""Execution plans, kept in the process and in files: one for each graph, device and version of cuDNN.

A file that cannot be read, or whose plan is not the one that was written, is made anew. Where nothing can be written, a plan
lives as long as the process.
"""

import contextlib
import functools
import hashlib
import json
from pathlib import Path

import jax

from jaxfuse.runtime import cache
from jaxfuse.runtime.cudnn import backend
from jaxfuse.runtime.cudnn.devices import KNOWN
from jaxfuse.runtime.cudnn.graph import Graph

FORMAT = 1


def key(graph: Graph, device: str, version: int) -> str:
    """The name under which a plan is kept."""
    return _digest(repr((FORMAT, graph, device, version)))


def plan(graph: Graph, device: str | None = None) -> backend.Plan | str:
    """A plan for the device (a JSON text of properties; None: the one at hand), or why there is none."""
    try:
        device = device or at_hand()
        return _plan(graph, device, backend.version())
    except backend.CudnnError as error:
        return str(error)


def path(name: str) -> Path:
    return cache.folder() / "cudnn" / f"{name}.json"


@functools.cache
def at_hand() -> str:
    """This machine's GPUs' properties; without one, to compile for another machine's, an H200's.

    Raises CudnnError where they are of several models: a program is lowered without knowing which of them will run it.
    """
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:
        return KNOWN["H200"]
    models = sorted({gpu.device_kind for gpu in gpus})
    if len(models) > 1:
        raise backend.CudnnError(f"a plan is for one model of GPU, and this machine has {' and '.join(models)}; "
                                 "CUDA_VISIBLE_DEVICES can hide the others")
    return backend.properties(gpus[0].local_hardware_id)


@functools.cache
def _plan(graph: Graph, device: str, version: int) -> backend.Plan | str:
    name = key(graph, device, version)
    if found := _read(path(name)):
        return found
    try:
        made = backend.build(graph, device)
    except backend.CudnnError as error:
        return str(error)
    with contextlib.suppress(OSError):
        cache.replace(path(name), json.dumps(made._asdict() | {"digest": _digest(made.text)}))
    return made


def _read(path: Path) -> backend.Plan | None:
    try:
        data = json.loads(path.read_text())
        found = backend.Plan(data["text"], int(data["workspace"]), int(data["engine"]))
        return found if data["digest"] == _digest(found.text) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
