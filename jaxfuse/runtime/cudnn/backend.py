"""Execution plans from operation graphs, by the graph API of libcudnn.so.9 (9.8 or newer), through ctypes.

The numbers are those of cuDNN's binary interface, which does not change within version 9. No GPU is needed: the device is what a
JSON text says. Kernels are compiled here (NVRTC, some seconds each), not when a program runs.
"""

import ctypes
import functools
import threading
from typing import Any, NamedTuple

from jaxfuse.runtime import ffi
from jaxfuse.runtime.cudnn.graph import Graph, Operation, Tensor

PACKAGES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
OLDEST = 90800
_calling = threading.RLock()  # plans are made one at a time


class CudnnError(Exception):
    """What could not be done, with cuDNN's status and its own words."""


class Plan(NamedTuple):
    """`text` is cuDNN's own serialisation, `workspace` in bytes, `engine` the number of the engine that runs it."""

    text: str
    workspace: int
    engine: int


# --- attributes: name -> (number, type) ---------------------------------------------------------------------------

_TYPES: dict[str, tuple[int, Any]] = dict(  # name -> (cudnnBackendAttributeType_t, what an element is)
    dtype=(1, ctypes.c_int), bool=(2, ctypes.c_bool), int64=(3, ctypes.c_int64), float32=(4, ctypes.c_float),
    float64=(5, ctypes.c_double), convolution_mode=(7, ctypes.c_int), heuristic=(8, ctypes.c_int), nan=(10, ctypes.c_int),
    numerical_note=(11, ctypes.c_int), pointwise_mode=(14, ctypes.c_int), descriptor=(15, ctypes.c_void_p),
    int32=(23, ctypes.c_int32), text=(24, ctypes.c_char))

_DTYPES = dict(float32=0, float16=2, bfloat16=9)
POINTWISE = dict(
    add=0, mul=1, relu=100, tanh=101, sigmoid=102, elu=103, gelu=104, softplus=105, swish=106, gelu_tanh=107)
_SETTINGS = dict(upper=4, slope=5, elu_alpha=6, softplus_beta=7, swish_beta=8)  # of a pointwise step
# kind -> (descriptor type, attribute of what describes it, of each role, of factors that must be 1 and 0)
OPERATIONS: dict[str, tuple[int, int, dict[str, int], tuple[int, ...]]] = dict(
    convolution=(10, 702, dict(w=703, x=704, y=705), (700, 701)), pointwise=(13, 750, dict(x=751, b=752, y=753), ()))
_BEST, _FALLBACK = 3, 2  # heuristics
# Numerical notes of engines that are passed over: they round more than float32 sums do, or differ from run to run.
_UNWANTED = {1: "down-converts", 2: "sums in less precision", 3: "FFT", 4: "not deterministic", 5: "Winograd"}


class Descriptor:
    """An object of cuDNN's: created, attributes set, finalised; destroyed with this one."""

    def __init__(self, library, kind: int):
        self._library, self._pointer = library, ctypes.c_void_p()
        self._used: list[Descriptor] = []
        self._checked(library.cudnnBackendCreateDescriptor(kind, ctypes.byref(self._pointer)), f"descriptor {kind}")

    def __del__(self):
        if self._pointer:
            self._library.cudnnBackendDestroyDescriptor(self._pointer)

    def set(self, attribute: int, type: str, *values) -> "Descriptor":
        number, element = _TYPES[type]
        if type == "descriptor":
            self._used += values  # they must live as long
            values = tuple(value._pointer for value in values)
        array = (element * len(values))(*values)
        self._checked(
            self._library.cudnnBackendSetAttribute(self._pointer, attribute, number, ctypes.c_int64(len(values)), array),
            f"attribute {attribute}")
        return self

    def finish(self) -> "Descriptor":
        self._checked(self._library.cudnnBackendFinalize(self._pointer), "finalising")
        return self

    def get(self, attribute: int, type: str, at_most: int) -> Any:
        """At most so many elements; how many there are, if that is 0."""
        number, element = _TYPES[type]
        array, count = (element * at_most)() if at_most else None, ctypes.c_int64()
        self._checked(
            self._library.cudnnBackendGetAttribute(
                self._pointer, attribute, number, ctypes.c_int64(at_most), ctypes.byref(count), array), f"reading {attribute}")
        return array[: count.value] if array is not None else count.value

    def get_text(self, attribute: int) -> str:
        return self.get(attribute, "text", self.get(attribute, "text", 0)).rstrip(b"\0").decode()

    def get_descriptors(self, attribute: int, kind: int, count: int) -> list["Descriptor"]:
        found = [Descriptor(self._library, kind) for _ in range(count)]
        array, n = (ctypes.c_void_p * count)(*[d._pointer for d in found]), ctypes.c_int64()
        self._checked(
            self._library.cudnnBackendGetAttribute(
                self._pointer, attribute, 15, ctypes.c_int64(count), ctypes.byref(n), array), f"reading {attribute}")
        return found[: n.value]

    def _checked(self, status: int, what: str):
        if status:
            words = ctypes.create_string_buffer(1024)
            self._library.cudnnGetLastErrorString(words, ctypes.c_size_t(len(words)))
            name = self._library.cudnnGetErrorString(status).decode()
            raise CudnnError(f"{what}: {name}: {words.value.decode(errors='replace')}")


# --- the library --------------------------------------------------------------------------------------------------


@functools.cache
def _loaded():
    """libcudnn.so.9 as jax's wheels bring it, else where the dynamic linker finds it. Raises CudnnError."""
    files = (ffi.installed_file(package, {"libcudnn.so.9"}) for package in PACKAGES)
    try:
        library = ctypes.CDLL(str(next(filter(None, files), "libcudnn.so.9")))
    except OSError as error:
        raise CudnnError(f"libcudnn.so.9 does not load ({error}); python -m pip install 'jax[cuda13]' brings it") from error
    try:
        library.cudnnGetErrorString.restype = ctypes.c_char_p
        library.cudnnGetVersion.restype = ctypes.c_size_t
    except AttributeError as error:
        raise CudnnError(f"libcudnn.so.9 is not cuDNN ({error}); python -m pip install 'jax[cuda13]' brings it") from error
    if (version := library.cudnnGetVersion()) < OLDEST:
        raise CudnnError(f"cuDNN {version} plans for no device but the one at hand, {OLDEST} or newer is needed")
    return library


def version() -> int:
    """As cuDNN counts: 92800 is 9.28.0. Raises CudnnError."""
    return _loaded().cudnnGetVersion()


def properties(ordinal: int) -> str:
    """The properties of a GPU of this machine, as JSON. Raises CudnnError."""
    return Descriptor(_loaded(), 38).set(2700, "int32", ordinal).finish().get_text(2702)


# --- from a graph to a plan ---------------------------------------------------------------------------------------


def build(graph: Graph, device: str) -> Plan:
    """The plan of the engine that cuDNN's heuristics put first among those that build, sum in float32 and repeat bitwise.

    `device` is a JSON text of properties. Raises CudnnError with what the last engine said, or that there is none.
    """
    with _calling:
        library = _loaded()
        target = Descriptor(library, 38).set(2702, "text", *_characters(device)).finish()
        operations = _operations(library, graph)
        whole = Descriptor(library, 15).set(801, "descriptor", *operations).finish()
        reason = "cuDNN has no engine for this graph"
        for mode in (_BEST, _FALLBACK):
            try:
                heuristics = Descriptor(library, 4).set(201, "descriptor", whole).set(200, "heuristic", mode)
                heuristics.set(204, "descriptor", target).finish()
                choices = heuristics.get_descriptors(202, 3, heuristics.get(202, "descriptor", 0))
            except CudnnError as error:
                reason = str(error)
                continue
            for choice in choices:
                try:
                    return _plan(library, choice, target)
                except CudnnError as error:
                    reason = str(error)
        raise CudnnError(reason)


def read(plan: Plan, device: str) -> Descriptor:
    """What the handler does with a plan before it runs it, which does so for the device at hand. Raises CudnnError."""
    with _calling:
        target = Descriptor(_loaded(), 38).set(2702, "text", *_characters(device)).finish()
        restored = Descriptor(_loaded(), 5).set(407, "descriptor", target).set(405, "text", *_characters(plan.text))
        return restored.finish()


def _plan(library, choice: Descriptor, target: Descriptor) -> Plan:
    (engine,) = choice.get_descriptors(300, 2, 1)
    (number,) = engine.get(1301, "int64", 1)
    unwanted = [_UNWANTED[note] for note in engine.get(1303, "numerical_note", 10) if note in _UNWANTED]
    if unwanted:
        raise CudnnError(f"engine {number} is passed over: {', '.join(unwanted)}")
    plan = Descriptor(library, 5).set(401, "descriptor", choice).set(407, "descriptor", target).finish()
    (workspace,) = plan.get(402, "int64", 1)
    return Plan(plan.get_text(405), workspace, number)


def _operations(library, graph: Graph) -> list[Descriptor]:
    tensors = {tensor.uid: _tensor(library, tensor) for tensor in graph.tensors}
    made = []
    for operation in graph.operations:
        kind, description, roles, factors = OPERATIONS[operation.kind]
        descriptor = Descriptor(library, kind).set(description, "descriptor", _described(library, operation))
        for role, uid in operation.tensors:
            descriptor.set(roles[role], "descriptor", tensors[uid])
        for attribute, value in zip(factors, (1.0, 0.0)):
            descriptor.set(attribute, "float32", value)
        made.append(descriptor.finish())
    return made


def _described(library, operation: Operation) -> Descriptor:
    settings: dict[str, Any] = dict(operation.settings)
    if operation.kind == "convolution":
        descriptor = Descriptor(library, 1).set(100, "dtype", _DTYPES["float32"]).set(101, "convolution_mode", 1)
        descriptor.set(106, "int64", len(settings["strides"]))
        for attribute, name in ((102, "dilation"), (103, "strides"), (104, "high"), (105, "low")):
            descriptor.set(attribute, "int64", *settings[name])
        return descriptor.finish()
    mode = settings.pop("mode")
    descriptor = Descriptor(library, 0).set(0, "pointwise_mode", POINTWISE[mode]).set(1, "dtype", _DTYPES["float32"])
    if mode == "relu":
        descriptor.set(2, "nan", 1)  # NaN comes out where it went in
    for name, value in settings.items():
        descriptor.set(_SETTINGS[name], "float64", value)
    return descriptor.finish()


def _tensor(library, tensor: Tensor) -> Descriptor:
    dtype, extents, strides = tensor.layout
    descriptor = Descriptor(library, 17).set(906, "int64", tensor.uid).set(901, "dtype", _DTYPES[dtype])
    descriptor.set(902, "int64", *extents).set(903, "int64", *strides).set(900, "int64", 16)
    return descriptor.set(907, "bool", tensor.virtual).finish()


def _characters(text: str):
    return [bytes([byte]) for byte in text.encode()]
