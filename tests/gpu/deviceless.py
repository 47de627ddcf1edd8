"""Programs compiled for an H200 on a machine without a GPU, and what their kernels move.

XLA needs a description of the device and no driver; jax-cuda13-plugin and jax-cuda13-pjrt of jax's own version must be
installed. Nothing is run. Kernels are not autotuned and not grouped into command buffers, as they would be on a device.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

# What XLA asks to know of an NVIDIA H200 SXM: NVIDIA's data sheet, and the compute capability tables of the CUDA C++ Programming Guide.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" model_str: "H200" platform_version: "9.0a"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.19.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  memory_bandwidth: 4800000000000 device_memory_size: 151397597184 l2_cache_size: 52428800
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 patch: 0 }
device_description_str: "NVIDIA H200"
"""

FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")  # instructions that launch nothing
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


class Launch(NamedTuple):
    """One instruction of the compiled program's top level; bytes as its operands and results have them."""

    op: str
    name: str
    target: str  # of a custom call
    read: int
    written: int
    callers: str  # the JAX operation it is from

    @property
    def moved(self) -> int:
        return self.read + self.written


@functools.cache
def _on_device():
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def spec(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_on_device())


def specs(tree):
    """The same tree with abstract values on the device."""
    return jax.tree.map(lambda leaf: spec(leaf.shape, leaf.dtype), tree)


def launches(function, *arguments) -> list[Launch]:
    """What `jit(function)` launches on the device."""
    return parse(jax.jit(function).lower(*arguments).compile().as_text())


def parse(hlo: str) -> list[Launch]:
    computations = {}
    for name, body in re.findall(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", hlo, re.S | re.M):
        computations[name] = [_Instruction.of(line) for line in body.splitlines()]
    entry = re.search(r"^ENTRY %([\w.\-]+)", hlo, re.M)[1]
    types = {i.name: _bytes(i.type) for i in computations[entry]}
    found = []
    for i in computations[entry]:
        if i.op in FREE:
            continue
        fused = computations[re.search(r"calls=%([\w.\-]+)", i.rest)[1]] if i.op == "fusion" else ()
        read = sum(min(types[operand], _read_of_parameter(fused, n)) for n, operand in enumerate(i.operands))
        target, callers = (re.search(pattern, i.rest) for pattern in (r'custom_call_target="([^"]*)"', r'op_name="([^"]*)"'))
        found.append(Launch(i.op, i.name, target[1] if target else "", read, types[i.name], callers[1] if callers else ""))
    return found


class _Instruction(NamedTuple):
    name: str
    type: str
    op: str
    operands: list[str]
    rest: str

    @classmethod
    def of(cls, line: str):
        name, type_, op, operands, rest = re.match(
            r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)", line).groups()
        return cls(name, type_, op, re.findall(r"%([\w.\-]+)", operands), f"({operands}){rest}")


def _read_of_parameter(fused: list[_Instruction], number: int) -> float:
    """Of what a fused kernel reads only slices, these; else all."""
    own = {i.name for i in fused if i.op == "parameter" and i.rest.startswith(f"({number})")}
    users = [i for i in fused if own & set(i.operands)]
    while passed := {i.name for i in users if i.op in ("bitcast", "convert")} - own:
        own |= passed
        users = [i for i in fused if own & set(i.operands)]
    users = [i for i in users if i.name not in own]
    return sum(_bytes(i.type) for i in users) if users and all(i.op == "slice" for i in users) else math.inf


def bytes_moved(found: list[Launch]) -> int:
    return sum(launch.moved for launch in found)


def _bytes(hlo_type: str) -> int:
    arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", hlo_type)
    return sum(SIZES.get(dtype, 0) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in arrays)
