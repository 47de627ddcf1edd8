"""The numbers every peer starts from: float32 numpy arrays, NHWC and HWIO, the same in every process."""

import math
import zlib

import numpy as np


class Normal:
    """Normally distributed numbers: by shape and batch, not by dtype or task, for the same ones serve f32 and bf16, forward and
    gradient."""

    def __init__(self, case):
        self.random = np.random.default_rng(zlib.crc32(f"{case.shape} {case.batch}".encode()))

    def __call__(self, *dims, scale=1.0):
        return self.random.standard_normal(dims, np.float32) * np.float32(scale)

    def around_one(self, channels):
        return 1 + self(channels, scale=0.2)


def operands(case):
    """(operands of the op by name, cotangent of its output)."""
    normal = Normal(case)
    arrays, output = _OPERANDS[case.kind](case.shape, case.batch, normal)
    return arrays, normal(*output)


def dtype(name, case):
    """Parameters of norms stay float32."""
    return "f32" if name.startswith(("gamma", "beta")) else case.dtype


def _conv(shape, batch, normal):
    n = shape.dimensions
    fan_in = shape.kernel**n * shape.inputs // shape.groups
    arrays = {
        "x": normal(batch, *[shape.size] * n, shape.inputs),
        "w": normal(*[shape.kernel] * n, shape.inputs // shape.groups, shape.outputs, scale=fan_in**-0.5),
        "bias": normal(shape.outputs, scale=0.5),
    }
    return arrays, (batch, *[shape.output_size] * n, shape.outputs)


def _dense(shape, batch, normal):
    output = batch, shape.size, shape.outputs
    arrays = {
        "x": normal(batch, shape.size, shape.inputs),
        "w": normal(shape.inputs, shape.outputs, scale=shape.inputs**-0.5),
        "bias": normal(shape.outputs, scale=0.5),
    }
    if shape.residual:
        arrays["residual"] = normal(*output)
    return arrays, output


def _batch_norm(shape, batch, normal):
    image, channels = (batch, shape.size, shape.size, shape.channels), shape.channels
    arrays = {
        "x": normal(*image) * normal.around_one(channels) + normal(channels),
        "gamma": normal.around_one(channels),
        "beta": normal(channels, scale=0.5),
    }
    if shape.residual:
        arrays["residual"] = normal(*image)
    return arrays, image


def _norm(shape, batch, normal):
    places = batch, *[shape.size] * shape.dimensions, shape.channels
    arrays = {"x": normal(*places) + normal(shape.channels), "gamma": normal.around_one(shape.channels)}
    if shape.norm != "rms":
        arrays["beta"] = normal(shape.channels, scale=0.5)
    return arrays, places


def _recurrent(shape, batch, normal):
    n, gates = shape.hidden, {"lstm": 4, "gru": 3}[shape.cell]
    arrays = {
        "x": normal(shape.size, batch, n),
        "w_x": normal(n, gates * n, scale=n**-0.5),
        "w_h": normal(n, gates * n, scale=n**-0.5),
        "bias": normal(gates * n, scale=0.5),
    }
    if shape.cell == "gru":
        arrays["bias_n"] = normal(n, scale=0.5)
    return arrays, (shape.size, batch, n)


def _transformer(shape, batch, normal):
    n, inner = shape.features, shape.inner
    tokens = batch, shape.size, n
    if not inner:
        heads = batch, shape.size, shape.heads, n // shape.heads
        return {name: normal(*heads) for name in ("q", "k", "v")}, heads
    arrays = {"x": normal(*tokens)}  # the keys' bias has no gradient but rounding: leaves of trees (checks.errors)
    for name, rows, columns in (("q", n, n), ("k", n, n), ("v", n, n), ("o", n, n), ("1", n, inner), ("2", inner, n)):
        arrays[f"w[{name}]"], arrays[f"bias[{name}]"] = normal(rows, columns, scale=rows**-0.5), normal(columns, scale=0.5)
    for name in ("attention", "output"):
        arrays[f"gamma[{name}]"], arrays[f"beta[{name}]"] = normal.around_one(n), normal(n, scale=0.5)
    return arrays, tokens


_OPERANDS = {
    "conv": _conv,
    "dense": _dense,
    "batch_norm": _batch_norm,
    "norm": _norm,
    "recurrent": _recurrent,
    "transformer": _transformer,
}


def _resnet50():
    """Shapes of its parameters: 161 of them, 25.6 million numbers."""
    yield from ((7, 7, 3, 64), (64,), (64,))
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        features = 64 * 2**stage
        outputs = 4 * features
        for block in range(blocks):
            kernels = [(1, 1, inputs, features), (3, 3, features, features), (1, 1, features, outputs)]
            for kernel in kernels + [(1, 1, inputs, outputs)] * (block == 0):
                yield from (kernel, kernel[-1:], kernel[-1:])
            inputs = outputs
    yield from ((2048, 1000), (1000,))


def parameters(case):
    """([parameter], [its gradient]) of an optimizer's case; small: every dimension at most 16."""
    normal, shapes = Normal(case), list({"resnet50": _resnet50}[case.shape.network]())
    if case.shape.small:
        shapes = [tuple(min(n, 16) for n in shape) for shape in shapes]
    scale = [math.prod(shape[:-1]) ** -0.5 for shape in shapes]
    return [normal(*shape, scale=s) for shape, s in zip(shapes, scale)], [normal(*shape, scale=0.01) for shape in shapes]


def network(case, channels_first=False):
    """What a network takes: images, NHWC or NCHW, or int32 tokens."""
    normal, shape = Normal(case), case.shape
    if shape.vocabulary:
        return normal.random.integers(shape.vocabulary, size=(case.batch, shape.size), dtype=np.int32)
    images = normal(case.batch, shape.size, shape.size, 3)
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2)) if channels_first else images


def labels(case):
    return np.arange(case.batch, dtype=np.int32) * 97 % 1000
