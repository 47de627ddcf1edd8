"""The PyTorch side of a worker: channels-last tensors, eager or torch.compile."""

import re
from functools import partial

import numpy as np
import torch

from . import inputs, issues, layers_torch, torch_models

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Prepared:
    """A call. `run()` makes one; `outputs` are the first call's, by name, as numpy arrays, laid out as JAX's."""

    temp_bytes = None  # PyTorch does not say

    def __init__(self, call, name_outputs):
        self.run = call
        self.outputs = {name: value.detach().float().numpy() for name, value in name_outputs(call()).items()}


class TorchPeer:
    def __init__(self, name):
        self.eager = name != "torch-compile"
        self.compile = (lambda function: function) if self.eager else partial(torch.compile, dynamic=False)
        onednn = re.search(r"MKL-DNN v(\S+)", torch.__config__.show())
        self.versions = {"torch": torch.__version__, "torch oneDNN": onednn and onednn[1], "torch threads": torch.get_num_threads()}

    def prepare(self, case, folder):
        torch.compiler.reset()
        prepare = {"issue": self._issue, "model": self._model, "optimizer": self._optimizer}.get(case.kind)
        return prepare(case) if prepare else self._op(case, folder)

    def _op(self, case, folder):
        arrays, cotangent = inputs.operands(case)
        images = layers_torch.images(case)

        def tensor(value, name, dtype):
            return layers_torch.to_torch(torch.from_numpy(value).to(DTYPES[dtype]), name, images)

        def named(outputs):
            return {name: layers_torch.from_torch(value, name, images) for name, value in outputs.items()}

        tensors = {name: tensor(value, name, inputs.dtype(name, case)) for name, value in arrays.items()}
        function = self.compile(layers_torch.layer(case))
        if case.task == "forward":
            return Prepared(torch.no_grad()(lambda: function(*tensors.values())), lambda y: named({"y": y}))
        if folder and (folder / "cotangent.npy").exists():
            cotangent = np.load(folder / "cotangent.npy").astype(np.float32)
        cotangent = tensor(cotangent, "y", case.dtype)
        leaves = [tensor.requires_grad_() for tensor in tensors.values()]

        def forward_and_gradients():
            y = function(*leaves)
            return y, torch.autograd.grad(y, leaves, cotangent)

        def all_named(result):
            y, gradients = result
            return named({"y": y, **{f"d{name}": value for name, value in zip(tensors, gradients, strict=True)}})

        return Prepared(forward_and_gradients, all_named)

    def _optimizer(self, case):
        parameters, gradients = ([torch.from_numpy(array) for array in arrays] for arrays in inputs.parameters(case))
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        step = self.compile(layers_torch.optimizer(case.shape.rule, parameters, fused=self.eager).step)

        def update():
            step()
            return parameters

        return Prepared(update, lambda tensors: {f"parameters[{i}]": tensor for i, tensor in enumerate(tensors)})

    def _issue(self, case):
        from . import issues_torch

        program, to_torch, back = issues_torch.program(case)
        function = self.compile(partial(program, of=issues.sizes(case.name, case.shape.small)))
        tensors = []
        for name, value in issues.arrays(case).items():
            tensor = torch.from_numpy(value).to(DTYPES[case.dtype])
            tensors.append(to_torch.get(name, lambda t: t)(tensor).contiguous())
        with_gradients = torch.enable_grad if case.task == "gradient" else torch.no_grad
        prepared = Prepared(with_gradients()(lambda: function(*tensors)), lambda outputs: {})
        outputs = prepared.run()
        prepared.outputs = {name: back.get(name, lambda t: t)(value.detach()).float().numpy() for name, value in outputs.items()}
        return prepared

    def _model(self, case):
        torch.manual_seed(0)
        model = torch_models.network(case.shape).to(memory_format=torch.channels_last)
        given = torch_models.given(case)
        if given.is_floating_point():
            dtype = DTYPES["f32" if case.task == "training" else case.dtype]
            given = given.to(dtype, memory_format=torch.channels_last)
        if case.task == "inference":
            apply = self.compile(model.eval().to(DTYPES[case.dtype]))
            prepared = Prepared(torch.no_grad()(lambda: apply(given)), lambda logits: {"logits": logits})
            return self._finite(prepared, (case.batch, 1000))
        labels = torch.from_numpy(inputs.labels(case)).long()
        train_step = torch_models.make_train_step(self.compile(model.train()), autocast=case.dtype == "bf16")
        return self._finite(Prepared(lambda: train_step(given, labels), lambda loss: {"loss": loss}), ())

    def _finite(self, prepared, shape):
        """The weights are PyTorch's own, so a model's numbers cannot be compared with the other peers'; that they are
        numbers can be seen."""
        (value,) = prepared.outputs.values()
        if value.shape != shape or not np.isfinite(value).all():
            raise ArithmeticError(f"output of shape {value.shape}, expected {shape} and finite")
        prepared.outputs = {}
        return prepared
