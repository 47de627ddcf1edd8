"""Inference runtimes: how each takes a network of PyTorch's to a file, with its weights as constants, and how it runs a file."""

import importlib


class _Runtime:
    name: str

    def __init__(self):
        self._module = importlib.import_module(self.name)
        self.versions = {self.name: self._module.__version__}


class OpenVINO(_Runtime):
    name, ending = "openvino", ".xml"

    def save(self, model, given, path):
        exported = self._module.convert_model(model, example_input=given, input=list(given.shape))
        self._module.save_model(exported, path, compress_to_fp16=False)

    def load(self, path, dtype):
        """run(array) -> logits."""
        options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": dtype}
        request = self._module.Core().compile_model(path, "CPU", options).create_infer_request()
        return lambda array: request.infer([array], share_inputs=True, share_outputs=True)[0]


class OnnxRuntime(_Runtime):
    name, ending = "onnxruntime", ".onnx"

    def save(self, model, given, path):
        from torch import onnx

        onnx.export(model, (given,), path, input_names=["x"], external_data=False, verbose=False)

    def load(self, path, dtype):
        """run(array) -> logits, in float32."""
        session = self._module.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda array: session.run(None, {"x": array})[0]


RUNTIMES = {runtime.name: runtime for runtime in (OpenVINO, OnnxRuntime)}
