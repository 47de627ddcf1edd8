"""The reported programs as PyTorch users write them: each takes tensors in PyTorch's layout (`_LAYOUT`) and gives the outputs by
name in JAX's."""

import torch
import torch.nn.functional as F


def _depthwise(x, w, bias, *, of):
    return {"y": F.conv2d(x, w, bias, padding=1, groups=x.shape[1])}


def _grouped_stack(x, target, *weights, of):
    leaves = [w.requires_grad_() for w in weights]
    for w in leaves:
        x = F.conv1d(x, w, padding="same", groups=x.shape[1])
    loss = ((x - target) ** 2).mean()
    gradients = torch.autograd.grad(loss, leaves)
    return {"loss": loss, **{f"dw{i}": gradient for i, gradient in enumerate(gradients)}}


def _dilated_depthwise(x, w, *, of):
    return {"y": F.conv1d(x, w, padding="same", dilation=of["dilation"], groups=x.shape[1])}


def _conv_in_loop(x, w, *, of):
    for _ in range(2):
        x = F.conv1d(x, w)
    return {"y": x}


def _transposed_1d(x, w, *, of):
    return {"y": F.conv_transpose1d(x, w, stride=of["hop"])}


def _transposed_3d_gradients(x, w, bias, *, of):
    leaves = w.requires_grad_(), bias.requires_grad_()
    loss = F.conv_transpose3d(x, *leaves, stride=2, padding=1, output_padding=1).mean()
    return dict(zip(("dw", "dbias"), torch.autograd.grad(loss, leaves)))


def _transposed_3d_filter_gradient(x, w, bias, *, of):
    w = w.requires_grad_()
    loss = F.conv_transpose3d(x, w, bias, stride=2, padding=1, output_padding=1).mean()
    return {"dw": torch.autograd.grad(loss, w)[0]}


def _per_sample(x, w, bias, *, of):
    def amplitude(w, bias, images):
        padded = F.pad(images, (0, 1, 0, 1), mode="circular")
        return F.relu(F.conv2d(padded, w, bias)).sum((1, 2, 3)).mean()

    dw, dbias = torch.func.vmap(torch.func.grad(amplitude, (0, 1)), (None, None, 0))(w, bias, x)
    return {"dw": dw, "dbias": dbias}


def _lstm(x, wi, wh, bias, *, of):
    leaves = [tensor.requires_grad_() for tensor in (x, wi, wh, bias)]
    zero = x.new_zeros(1, x.shape[0], wh.shape[1])
    y = torch.lstm(x, (zero, zero), (wi, wh, bias, torch.zeros_like(bias)), True, 1, 0.0, True, False, True)[0]
    loss = (y**2).mean()
    return {"loss": loss, **dict(zip(("dx", "dwi", "dwh", "dbias"), torch.autograd.grad(loss, leaves)))}


_PROGRAMS = {
    "jax#23713": _depthwise,
    "jax#13800": _grouped_stack,
    "jax#26266": _dilated_depthwise,
    "jax#12868": _conv_in_loop,
    "jax#23783": _transposed_1d,
    "jax#31662": _transposed_3d_gradients,
    "xla#34273": _transposed_3d_filter_gradient,
    "jax#1606": _per_sample,
    "jax#13111": _lstm,
}


def _flipped(tensor):
    """A filter of JAX's fractionally strided convolution, [out, in, *window], as that of a transposed one, [in, out, *window]."""
    return tensor.flip(tuple(range(2, tensor.ndim))).transpose(0, 1)


# {issue: {argument: to PyTorch's layout}}; and the same for its outputs, from it.
_LAYOUT = {
    "jax#23713": {"x": lambda t: t.permute(0, 3, 1, 2), "w": lambda t: t.permute(3, 2, 0, 1)},
    "jax#13800": {f"w{i}": lambda t: t.transpose(0, 1) for i in range(12)},
    "jax#26266": {"x": lambda t: t.transpose(1, 2), "w": lambda t: t.permute(2, 1, 0)},
    "jax#23783": {"w": lambda t: t.flip(2)},
    "jax#31662": {"w": _flipped, "bias": torch.flatten},
    "xla#34273": {"w": _flipped, "bias": torch.flatten},
    "jax#1606": {"bias": torch.flatten},
    "jax#13111": {"wi": torch.t, "wh": torch.t},
}
_BACK = {
    "jax#23713": {"y": lambda t: t.permute(0, 2, 3, 1)},
    "jax#13800": {f"dw{i}": lambda t: t.transpose(0, 1) for i in range(12)},
    "jax#26266": {"y": lambda t: t.transpose(1, 2)},
    "jax#31662": {"dw": lambda t: _flipped(t)[None], "dbias": lambda t: t.reshape(1, 1, 1, 1, 1)},
    "xla#34273": {"dw": _flipped},
    "jax#1606": {"dbias": lambda t: t.reshape(-1, 1, 1, 1, 1)},
    "jax#13111": {"dwi": torch.t, "dwh": torch.t},
}


def program(case):
    """(function of tensors, {argument: to PyTorch's layout}, {output: to JAX's})."""
    return _PROGRAMS[case.name], _LAYOUT.get(case.name, {}), _BACK.get(case.name, {})
