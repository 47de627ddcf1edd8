"""The side of a worker that is an inference runtime, OpenVINO or ONNX Runtime: PyTorch's networks, exported with their weights as
constants."""

import io

import numpy as np
import torch

from . import inputs, torch_models

NEARLY = 1e-3  # relative difference between the runtime's logits and PyTorch's in float32; in bf16 a hundred times as much


class Prepared:
    """A call. `run()` makes one."""

    temp_bytes = None  # they do not say

    def __init__(self, call):
        self.run, self.outputs = call, {}


class ExportedPeer:
    def __init__(self, name):
        self._compiled, self.versions = dict(openvino=_openvino, onnxruntime=_onnxruntime)[name]()
        self.versions |= {"torch": torch.__version__}

    def prepare(self, case, folder):
        """Raises ArithmeticError where the exported network computes something else than PyTorch's."""
        torch.manual_seed(0)
        model = torch_models.NETWORKS[case.shape.network]().eval()
        images = inputs.images(case).transpose(0, 3, 1, 2).copy()
        with torch.no_grad():
            expected = model(torch.from_numpy(images)).numpy()
        call = self._compiled(model, images, case.dtype)
        logits, allowed = call(), NEARLY * (1 if case.dtype == "f32" else 100)
        if logits.shape != expected.shape or not np.abs(logits - expected).max() <= allowed * np.abs(expected).max():
            raise ArithmeticError(f"the exported {case.shape.network} is off by {np.abs(logits - expected).max():.2g}")
        return Prepared(call)


def _openvino():
    import openvino

    core = openvino.Core()

    def compiled(model, images, dtype):
        exported = openvino.convert_model(model, example_input=torch.from_numpy(images), input=list(images.shape))
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": dtype}
        request = core.compile_model(exported, "CPU", options).create_infer_request()
        return lambda: request.infer([images], share_inputs=True, share_outputs=True)[0]

    return compiled, {"openvino": openvino.__version__}


def _onnxruntime():
    import onnxruntime

    def compiled(model, images, dtype):
        file = io.BytesIO()
        torch.onnx.export(model, (torch.from_numpy(images),), file, input_names=["x"], verbose=False)
        session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
        return lambda: session.run(None, {"x": images})[0]

    return compiled, {"onnxruntime": onnxruntime.__version__}
