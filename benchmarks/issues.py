"""python -m benchmarks.issues [--small]: what users reported as slow, beside PyTorch; as `python -m benchmarks issue`.

The programs are ours, after the descriptions in the issues (`cases.ISSUES` has the titles). Where a report's sizes would take
XLA many seconds for a call, or were for a GPU, they are smaller here. This file has sizes and numbers; it imports no framework.
"""

import sys
import zlib

import numpy as np

# Of every issue: full and small.
SIZES = {
    "jax#23713": (dict(batch=1, size=124, channels=256), dict(batch=1, size=12, channels=16)),
    "jax#13800": (dict(batch=2, channels=512, steps=1024, width=5, layers=3), dict(batch=2, channels=8, steps=16, width=5, layers=2)),
    "jax#26266": (dict(batch=8, channels=128, steps=1024, width=5, dilation=16), dict(batch=2, channels=8, steps=64, width=5, dilation=4)),
    "jax#12868": (dict(batch=1, channels=250, steps=1024), dict(batch=1, channels=16, steps=32)),
    "jax#23783": (dict(batch=2, steps=128, channels=513, width=1024, hop=256), dict(batch=1, steps=8, channels=8, width=16, hop=4)),
    "jax#31662": (dict(batch=1, channels=64, size=(32, 32, 32)), dict(batch=1, channels=8, size=(8, 8, 4))),
    "xla#34273": (dict(batch=1, channels=64, size=(64, 64, 32)), dict(batch=1, channels=8, size=(8, 8, 4))),
    "jax#1606": (dict(batch=400, symmetries=8, size=4), dict(batch=6, symmetries=2, size=4)),
    "jax#13111": (dict(batch=8, steps=64, hidden=512), dict(batch=2, steps=5, hidden=16)),
}


def sizes(name, small=False):
    return SIZES[name][small]


def arrays(case):
    """The program's arguments by name, in JAX's layout of the report."""
    random, of = np.random.default_rng(zlib.crc32(case.name.encode())), sizes(case.name, case.shape.small)

    def normal(*dims, scale=1.0):
        return random.standard_normal(dims, np.float32) * np.float32(scale)

    batch = of["batch"]
    match case.name:
        case "jax#23713":
            n, c = of["size"], of["channels"]
            return {"x": normal(batch, n, n, c), "w": normal(3, 3, 1, c, scale=1 / 3), "bias": normal(c)}
        case "jax#13800":
            c, k, steps = of["channels"], of["width"], of["steps"]
            weights = {f"w{i}": normal(1, c, k, scale=k**-0.5) for i in range(of["layers"])}
            return {"x": normal(batch, c, steps), "target": normal(batch, c, steps), **weights}
        case "jax#26266":
            return {"x": normal(batch, of["steps"], of["channels"]), "w": normal(of["width"], 1, of["channels"], scale=of["width"] ** -0.5)}
        case "jax#12868":
            c = of["channels"]
            return {"x": normal(batch, c, of["steps"]), "w": normal(c, c, 1, scale=c**-0.5)}
        case "jax#23783":
            c, k = of["channels"], of["width"]
            return {"x": normal(batch, c, of["steps"]), "w": normal(c, 1, k, scale=c**-0.5)}
        case "jax#31662" | "xla#34273":
            c = of["channels"]
            return {"x": normal(batch, c, *of["size"]), "w": normal(1, c, 3, 3, 3, scale=c**-0.5), "bias": normal(1, 1, 1, 1)}
        case "jax#1606":
            n = of["size"]
            return {"x": np.sign(normal(batch, of["symmetries"], 1, n, n)), "w": normal(1, 1, 2, 2), "bias": normal(1, 1, 1, 1)}
        case "jax#13111":
            h = of["hidden"]
            return {"x": normal(batch, of["steps"], h), "wi": normal(h, 4 * h, scale=h**-0.5),
                    "wh": normal(h, 4 * h, scale=h**-0.5), "bias": normal(4 * h)}  # fmt: skip
    raise ValueError(f"no program for {case.name}")


if __name__ == "__main__":
    from .__main__ import guarded

    sys.exit(guarded(["issue", *("--quick" if argument == "--small" else argument for argument in sys.argv[1:])]))
