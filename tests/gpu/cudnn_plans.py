"""Builds cuDNN's plans for a GPU that is not there, and prints a table of which graphs have one.

    python -m pip install nvidia-cudnn-cu13           # 500 MB; 9.8 or newer
    python tests/gpu/cudnn_plans.py [H100] [H200] [--only TEXT]

A plan that builds has been compiled for the device and checked by cuDNN against its properties; it has not been run. A refusal
holds for these properties and this version.
"""

import argparse
import ctypes
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from jaxfuse.ops.activations import TABLE, named  # noqa: E402
from jaxfuse.runtime.cudnn import backend, graph  # noqa: E402
from jaxfuse.runtime.cudnn.devices import KNOWN  # noqa: E402

NHWC, HWIO = (0, 3, 1, 2), (3, 2, 0, 1)


def arrays(dtype="bfloat16", n=32, size=56, c=64, k=64, kernel=3, stride=1, dilation=1, groups=1, nchw=False, hwio=False, rank=4):
    """(x, w, y, window) of a convolution with SAME padding."""
    spatial = rank - 2
    out = -(-size // stride)
    pad = max((out - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    axes = (0, rank - 1, *range(1, rank - 1))

    def image(channels, side):
        if nchw:
            return graph.row_major(dtype, (n, channels, *[side] * spatial), range(rank))
        return graph.row_major(dtype, (n, *[side] * spatial, channels), axes)

    w = graph.row_major(dtype, (k, *[kernel] * spatial, c // groups), axes)
    if hwio:
        w = graph.row_major(dtype, (kernel, kernel, c // groups, k), HWIO)
    window = graph.window_of((stride,) * spatial, ((pad // 2, pad - pad // 2),) * spatial, (dilation,) * spatial)
    return image(c, size), w, image(k, out), window


def conv(activation="silu", *, scale=False, bias="float32", residual=False, alpha=0.1, residual_last=False, returns_z=False, **shape):
    x, w, y, window = arrays(**shape)
    rank, channels = len(y.extents), y.extents[1]
    vector = graph.per_channel("float32", channels, rank)
    return graph.convolution(
        x, w, y, window, scale=vector if scale else None, bias=graph.per_channel(bias, channels, rank) if bias else None,
        residual=y if residual else None, activation=named(activation, alpha).cudnn, residual_last=residual_last, returns_z=returns_z)


def cases():
    """(what, its graph), in bfloat16 unless it says otherwise."""
    for activation in [name for name in TABLE if named(name, 0.1).cudnn]:
        if activation not in ("maximum0", "clip6"):  # as relu and relu6
            yield f"conv + bias + {activation}", conv(activation)
    for what, options in EPILOGUES.items():
        yield what, conv(**options)
    for what, shape in SHAPES.items():
        yield f"conv + bias + silu: {what}", conv(**shape)
    for dtype in ("float16", "float32"):
        for activation in ("relu", "silu", "gelu"):
            yield f"conv + bias + {activation}, {dtype}", conv(activation, dtype=dtype)


EPILOGUES = {
    "conv + relu": dict(activation="relu", bias=None),
    "conv + bias + silu, bias in bfloat16": dict(bias="bfloat16"),
    "conv + scale + bias + relu": dict(activation="relu", scale=True),
    "conv + scale + bias + add + relu": dict(activation="relu", scale=True, residual=True),
    "conv + scale + bias + add + silu": dict(scale=True, residual=True),
    "conv + bias + add + gelu": dict(activation="gelu", residual=True),
    "conv + bias + silu + add": dict(residual=True, residual_last=True),
    "conv + bias + silu, and what silu is applied to": dict(returns_z=True),
    "conv + bias + add + gelu, and what gelu is applied to": dict(activation="gelu", residual=True, returns_z=True),
}
SHAPES = {
    "1×1, 64→256, 56²": dict(k=256, kernel=1), "1×1, 512→2048, 7²": dict(size=7, c=512, k=2048, kernel=1),
    "3×3 stride 2, 128, 56²": dict(c=128, k=128, stride=2), "3×3, 512, 7²": dict(size=7, c=512, k=512),
    "3×3 dilation 2, 256, 28²": dict(size=28, c=256, k=256, dilation=2),
    "7×7 stride 2, 3→64, 224²": dict(size=224, c=3, kernel=7, stride=2), "batch 1": dict(n=1),
    "3×3, 60→68": dict(c=60, k=68), "3×3, 61→67": dict(c=61, k=67), "32 groups, 128": dict(c=128, k=128, groups=32),
    "depthwise, 192": dict(c=192, k=192, groups=192), "3-D, 32, 16³": dict(rank=5, size=16, c=32, k=32),
    "1-D, 64": dict(rank=3, size=1024), "NCHW": dict(nchw=True), "filter HWIO": dict(hwio=True),
}


def load_stub():
    """A libcuda.so.1 in this process, unless there is a real one."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with tempfile.TemporaryDirectory() as folder:
            library = f"{folder}/libcuda.so.1"
            subprocess.run(["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, HERE / "stub_libcuda.c"], check=True)
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="*", choices=[*KNOWN, []], default=[])
    parser.add_argument("--only", default="", help="graphs whose description has this in it")
    args = parser.parse_args()
    load_stub()
    devices = args.device or list(KNOWN)
    print(f"cuDNN {backend.version()}\n\n| graph | {' | '.join(devices)} |\n|---|{'---|' * len(devices)}", flush=True)
    for what, described in cases():
        if args.only in what:
            print(f"| {what} | {' | '.join(outcome(described, KNOWN[device]) for device in devices)} |", flush=True)


def outcome(described, device) -> str:
    try:
        plan = backend.build(described, device)
        backend.read(plan, device)
    except backend.CudnnError as error:
        return f"no: {error}".replace("|", "/")
    return f"engine {plan.engine}" + (f", workspace {plan.workspace / 2**20:.1f} MiB" if plan.workspace else "")


if __name__ == "__main__":
    main()
