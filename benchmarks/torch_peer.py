"""The PyTorch side of a worker: channels-last tensors, eager or torch.compile."""

import re
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from . import inputs, issues, torch_models

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


ACTIVATIONS = {"relu": torch.Tensor.relu_, "silu": F.silu}


def conv_bias_activation(x, w, bias, *, shape):
    if shape.transposed:  # PyTorch's is the gradient of a convolution: the filter the other way round
        w, padding = w.transpose(0, 1).flip(2, 3), shape.kernel - 1 - shape.padding[0]
        y = F.conv_transpose2d(x, w, bias, shape.stride, padding)
    elif shape.causal:
        y = F.conv1d(F.pad(x, shape.padding), w, bias, shape.stride, 0, shape.dilation, shape.groups)
    else:
        y = F.conv2d(x, w, bias, shape.stride, shape.padding[0], shape.dilation, shape.groups)
    return ACTIVATIONS[shape.activation](y)


def batch_norm_add_activation(x, gamma, beta, residual=None, *, shape):
    y = F.batch_norm(x, None, None, gamma, beta, training=True, eps=1e-5)
    if residual is not None:
        y += residual
    return ACTIVATIONS[shape.activation](y)


def dense(x, w, bias, residual=None, *, activation):
    y = F.linear(x, w, bias)
    if residual is not None:
        y = y + residual
    return F.gelu(y) if activation == "gelu" else y


def layer(case):
    if case.kind == "dense":
        return partial(dense, activation=case.shape.activation)
    return partial(conv_bias_activation if case.kind == "conv" else batch_norm_add_activation, shape=case.shape)


class Prepared:
    """A call. `run()` makes one; `outputs` are the first call's, by name, as numpy arrays, images and kernels in JAX's order."""

    temp_bytes = None  # PyTorch does not say

    def __init__(self, call, name_outputs, images=True):
        self.run = call
        self.outputs = {name: _numpy(name, value.detach(), images) for name, value in name_outputs(call()).items()}


def _numpy(name, value, images):
    if images and value.ndim > 2:
        spatial = range(2, value.ndim)
        value = value.permute((*spatial, 1, 0) if name == "dw" else (0, *spatial, 1))
    elif name == "dw" and value.ndim == 2:
        value = value.T
    return value.float().numpy()


def _tensor(value, dtype, name="", images=True):
    """As PyTorch lays it out: channels of images and filters first, filters of dense layers transposed."""
    tensor = torch.from_numpy(value).to(DTYPES[dtype])
    if not images or value.ndim < 3:
        return tensor.T.contiguous() if value.ndim == 2 and name == "w" else tensor
    *first, last = range(value.ndim)
    tensor = tensor.permute((last, last - 1, *first[:-1]) if name == "w" else (0, last, *first[1:]))
    return tensor.contiguous(memory_format=torch.channels_last if value.ndim == 4 else torch.contiguous_format)


class TorchPeer:
    def __init__(self, name):
        self.compile = partial(torch.compile, dynamic=False) if name == "torch-compile" else lambda function: function
        onednn = re.search(r"MKL-DNN v(\S+)", torch.__config__.show())
        self.versions = {"torch": torch.__version__, "torch oneDNN": onednn and onednn[1], "torch threads": torch.get_num_threads()}

    def prepare(self, case, folder):
        torch.compiler.reset()
        if case.kind == "issue":
            return self._issue(case)
        return self._model(case) if case.kind == "model" else self._op(case, folder)

    def _op(self, case, folder):
        arrays, cotangent = inputs.operands(case)
        images = case.kind in ("conv", "batch_norm")
        tensors = {name: _tensor(value, "f32" if name in ("gamma", "beta") else case.dtype, name, images)
                   for name, value in arrays.items()}
        function = self.compile(layer(case))
        if case.task == "forward":
            return Prepared(torch.no_grad()(lambda: function(*tensors.values())), lambda y: {"y": y}, images)
        if folder and (folder / "cotangent.npy").exists():
            cotangent = np.load(folder / "cotangent.npy").astype(np.float32)
        cotangent = _tensor(cotangent, case.dtype, images=images)
        leaves = [tensor.requires_grad_() for tensor in tensors.values()]

        def forward_and_gradients():
            y = function(*leaves)
            return y, torch.autograd.grad(y, leaves, cotangent)

        def named(result):
            return {"y": result[0], **{f"d{name}": value for name, value in zip(tensors, result[1], strict=True)}}

        return Prepared(forward_and_gradients, named, images)

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
        model = torch_models.NETWORKS[case.shape.network]().to(memory_format=torch.channels_last)
        images = _tensor(inputs.images(case), "f32" if case.task == "training" else case.dtype)
        if case.task == "inference":
            apply = self.compile(model.eval().to(DTYPES[case.dtype]))
            prepared = Prepared(torch.no_grad()(lambda: apply(images)), lambda logits: {"logits": logits})
            return self._finite(prepared, (case.batch, 1000))
        labels = torch.from_numpy(inputs.labels(case)).long()
        train_step = torch_models.make_train_step(self.compile(model.train()), autocast=case.dtype == "bf16")
        return self._finite(Prepared(lambda: train_step(images, labels), lambda loss: {"loss": loss}), ())

    def _finite(self, prepared, shape):
        """The weights are PyTorch's own, so a model's numbers cannot be compared with the other peers'; that they are
        numbers can be seen."""
        (value,) = prepared.outputs.values()
        if value.shape != shape or not np.isfinite(value).all():
            raise ArithmeticError(f"output of shape {value.shape}, expected {shape} and finite")
        prepared.outputs = {}
        return prepared
