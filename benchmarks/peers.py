"""Who is measured. One peer is one process with one setting: environment variables of that process and nothing else."""

import functools
import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Peer:
    """`dtypes`: of what takes networks in inference only; none: all cases. `has_constants`: of a network in inference it has the
    weights as constants, which it may fold and lay out once."""

    title: str
    framework: str
    environment: dict = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    has_constants: bool = False

    def takes(self, case):
        return not self.dtypes or case.kind == "model" and case.task == "inference" and case.dtype in self.dtypes


PEERS = {
    "jaxfuse": Peer("jaxfuse", "jax"),
    "frozen": Peer("jaxfuse.freeze", "jax", dtypes=("f32", "bf16"), has_constants=True),
    "xla": Peer("XLA", "jax"),
    # Convolutions away from YNNPACK, reductions to it: the fastest setting of jaxlib 0.10 on convolutional networks.
    "xla-tuned": Peer("XLA tuned", "jax", {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type=reduce"}),
    "torch": Peer("PyTorch", "torch"),
    # Of a network in inference the weights are constants then, folded and laid out once.
    "torch-compile": Peer("torch.compile", "torch", {"TORCHINDUCTOR_FREEZING": "1"}, has_constants=True),
    "openvino": Peer("OpenVINO", "openvino", dtypes=("f32", "bf16"), has_constants=True),
    "onnxruntime": Peer("ONNX Runtime", "onnxruntime", dtypes=("f32",), has_constants=True),
}
# What a peer's interpreter must be able to import; those of the first are asked of the one that runs this.
NEEDS = {
    "jax": ("jax", "flax"),
    "torch": ("torch", "numpy"),
    "openvino": ("torch", "openvino"),
    "onnxruntime": ("torch", "onnx", "onnxscript", "onnxruntime"),
}
OURS = ("jaxfuse", "frozen")
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
    interpreters, left_out = {}, []
    for name in names:
        framework = PEERS[name].framework
        interpreter = sys.executable if framework == "jax" else torch_python or sys.executable
        reason = _not_installed(name) if framework == "jax" else _not_importable(framework, interpreter)
        if reason:
            left_out.append(f"{name} is left out: {reason}.")
        else:
            interpreters[name] = interpreter
    return interpreters, left_out


def _not_installed(name):
    """Not by looking for the module: the source folder jaxfuse/ is there without being installed."""
    for package in (*NEEDS["jax"], *["jaxfuse"] * (name in OURS)):
        if not any(importlib.metadata.distributions(name=package)):
            return f"{package} is not installed in {sys.executable}"
    return ""


@functools.cache
def _not_importable(framework, interpreter):
    missing = [m for m in NEEDS[framework] if subprocess.run([interpreter, "-c", f"import {m}"], capture_output=True).returncode]
    return f"{interpreter} cannot import {' and '.join(missing)}; --torch-python names an interpreter that can" if missing else ""
