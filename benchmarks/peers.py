"""Who is measured. One peer is one process with one setting: environment variables of that process and nothing else."""

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peer:
    title: str
    framework: str
    environment: dict = field(default_factory=dict)


PEERS = {
    "jaxfuse": Peer("jaxfuse", "jax"),
    "xla": Peer("XLA", "jax"),
    # Convolutions away from YNNPACK, reductions to it: the fastest setting of jaxlib 0.10 on convolutional networks.
    "xla-tuned": Peer("XLA tuned", "jax", {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type=reduce"}),
    "torch": Peer("PyTorch", "torch"),
    "torch-compile": Peer("torch.compile", "torch"),
}
REFERENCE = "reference"  # the float64 truth; never timed
REFERENCE_PEER = Peer("float64", "jax", {"JAX_ENABLE_X64": "1"})

# glibc gives large freed buffers back to the kernel and faults them in again at the next call; the tuned setting keeps
# them. All peers get the same one.
ALLOCATORS = {
    "default": {},
    "tuned": {
        "MALLOC_MMAP_THRESHOLD_": "4000000000",
        "MALLOC_TRIM_THRESHOLD_": "8000000000",
        "MALLOC_TOP_PAD_": "536870912",
        # one arena: only the main one can keep more than 64 MB, and XLA allocates on other threads
        "MALLOC_ARENA_MAX": "1",
    },
}
# What a shell may have set, and what would make peers unequal.
_DROPPED = (
    *("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_COMPILATION_CACHE_DIR", "JAXFUSE_LOG"),
    *("OMP_NUM_THREADS", "GLIBC_TUNABLES", "LD_PRELOAD"),
)


def lookup(name):
    return REFERENCE_PEER if name == REFERENCE else PEERS[name]


def environment(name, allocator):
    """The whole environment of a worker process."""
    kept = {key: value for key, value in os.environ.items() if key not in _DROPPED and not key.startswith("MALLOC_")}
    return {**kept, "JAX_PLATFORMS": "cpu", **lookup(name).environment, **ALLOCATORS[allocator]}


def available(names, torch_python):
    """({peer: interpreter}, [a sentence for each peer left out])."""
    torch_python = torch_python or sys.executable
    missing = {}
    for package in ("jax", "flax", "jaxfuse"):
        # Not by looking for the module: the source folder jaxfuse/ is there without being installed.
        if not any(importlib.metadata.distributions(name=package)):
            missing[package] = f"{package} is not installed in {sys.executable}"
    if any(PEERS[name].framework == "torch" for name in names):
        probe = subprocess.run([torch_python, "-c", "import torch, numpy"], capture_output=True, text=True)
        if probe.returncode:
            missing["torch"] = f"{torch_python} cannot import torch; --torch-python names an interpreter that can"
    interpreters, left_out = {}, []
    for name in names:
        needed = ["torch"] if PEERS[name].framework == "torch" else ["jax", "flax"] + ["jaxfuse"] * (name == "jaxfuse")
        reasons = [missing[package] for package in needed if package in missing]
        if reasons:
            left_out.append(f"{name} is left out: {reasons[0]}.")
        else:
            interpreters[name] = torch_python if PEERS[name].framework == "torch" else sys.executable
    return interpreters, left_out
