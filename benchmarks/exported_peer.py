"""The side of a worker that is an inference runtime, OpenVINO or ONNX Runtime: PyTorch's networks, exported with their weights as
constants."""

import tempfile
from pathlib import Path

import numpy as np
import torch

from . import torch_models
from .runtimes import RUNTIMES

NEARLY = 1e-3  # relative difference between the runtime's logits and PyTorch's in float32; in bf16 a hundred times as much


class Prepared:
    """A call. `run()` makes one."""

    temp_bytes = None  # they do not say

    def __init__(self, call):
        self.run, self.outputs = call, {}


class ExportedPeer:
    def __init__(self, name):
        self._runtime = RUNTIMES[name]()
        self.versions = {**self._runtime.versions, "torch": torch.__version__}

    def prepare(self, case, folder):
        """Raises ArithmeticError where the exported network computes something else than PyTorch's."""
        torch.manual_seed(0)
        model, given = torch_models.network(case.shape).eval(), torch_models.given(case)
        with torch.no_grad():
            expected = model(given).numpy()
        with tempfile.TemporaryDirectory() as exported:
            path = Path(exported) / f"network{self._runtime.ending}"
            self._runtime.save(model, given, path)
            run = self._runtime.load(path, case.dtype)
        array = given.numpy()
        logits, allowed = run(array), NEARLY * (1 if case.dtype == "f32" else 100)
        if logits.shape != expected.shape or not np.abs(logits - expected).max() <= allowed * np.abs(expected).max():
            raise ArithmeticError(f"the exported {case.shape.network} is off by {np.abs(logits - expected).max():.2g}")
        return Prepared(lambda: run(array))
