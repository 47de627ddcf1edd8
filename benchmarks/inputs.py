"""The numbers every peer starts from: float32 numpy arrays, NHWC and HWIO, the same in every process."""

import zlib

import numpy as np


def _generator(case):
    # By shape and batch, not by dtype or task: the same numbers serve f32 and bf16, forward and gradient.
    return np.random.default_rng(zlib.crc32(f"{case.shape} {case.batch}".encode()))


def operands(case):
    """(operands of the op by name, cotangent of its output)."""
    random, shape = _generator(case), case.shape

    def normal(*dims, scale=1.0):
        return random.standard_normal(dims, np.float32) * np.float32(scale)

    if case.kind == "conv":
        n = shape.dimensions
        fan_in = shape.kernel**n * shape.inputs // shape.groups
        arrays = {
            "x": normal(case.batch, *[shape.size] * n, shape.inputs),
            "w": normal(*[shape.kernel] * n, shape.inputs // shape.groups, shape.outputs, scale=fan_in**-0.5),
            "bias": normal(shape.outputs, scale=0.5),
        }
        return arrays, normal(case.batch, *[shape.output_size] * n, shape.outputs)
    if case.kind == "dense":
        tokens = (case.batch, shape.size)
        arrays = {
            "x": normal(*tokens, shape.inputs),
            "w": normal(shape.inputs, shape.outputs, scale=shape.inputs**-0.5),
            "bias": normal(shape.outputs, scale=0.5),
        }
        if shape.residual:
            arrays["residual"] = normal(*tokens, shape.outputs)
        return arrays, normal(*tokens, shape.outputs)
    image = (case.batch, shape.size, shape.size)
    channels = shape.channels
    arrays = {
        "x": normal(*image, channels) * (1 + normal(channels, scale=0.2)) + normal(channels),
        "gamma": 1 + normal(channels, scale=0.2),
        "beta": normal(channels, scale=0.5),
    }
    if shape.residual:
        arrays["residual"] = normal(*image, channels)
    return arrays, normal(*image, channels)


def images(case):
    random = _generator(case)
    return random.standard_normal((case.batch, case.shape.size, case.shape.size, 3), np.float32)


def labels(case):
    return np.arange(case.batch, dtype=np.int32) * 97 % 1000
