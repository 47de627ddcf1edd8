"""The layers of layers_jax.py in PyTorch; `to_torch` and `from_torch` say how their operands lie."""

from functools import partial

import torch
import torch.nn.functional as F

IMAGES = ("conv", "batch_norm")


def conv_bias_activation(x, w, bias, *, shape):
    if shape.transposed:  # PyTorch's is the gradient of a convolution: the filter the other way round
        w, padding = w.transpose(0, 1).flip(2, 3), shape.kernel - 1 - shape.padding[0]
        y = F.conv_transpose2d(x, w, bias, shape.stride, padding)
    elif shape.causal:
        y = F.conv1d(F.pad(x, shape.padding), w, bias, shape.stride, 0, shape.dilation, shape.groups)
    else:
        y = F.conv2d(x, w, bias, shape.stride, shape.padding[0], shape.dilation, shape.groups)
    return _ACTIVATIONS[shape.activation](y)


def batch_norm_add_activation(x, gamma, beta, residual=None, *, shape):
    y = F.batch_norm(x, None, None, gamma, beta, training=True, eps=1e-5)
    if residual is not None:
        y += residual
    return _ACTIVATIONS[shape.activation](y)


def dense_activation(x, w, bias, residual=None, *, shape):
    y = F.linear(x, w, bias)
    if residual is not None:
        y = y + residual
    return _ACTIVATIONS[shape.activation](y)


def norm_activation(x, gamma, beta=None, *, shape):
    if shape.norm == "layer":
        return F.layer_norm(x, gamma.shape, gamma, beta, 1e-5)
    if shape.norm == "rms":
        return F.rms_norm(x, gamma.shape, gamma.to(x.dtype), 1e-5)
    return _ACTIVATIONS[shape.activation](F.group_norm(x, 32, gamma, beta, 1e-5))


def recurrent(x, w_x, w_h, bias, bias_n=None, *, shape):
    zeros = x.new_zeros(1, x.shape[1], shape.hidden)
    options = True, 1, 0.0, True, False, False  # biases, layers, dropout, training, both directions, batch first
    if shape.cell == "lstm":
        return torch.lstm(x, (zeros, zeros), (w_x, w_h, bias, torch.zeros_like(bias)), *options)[0]
    return torch.gru(x, zeros, (w_x, w_h, bias, F.pad(bias_n, (2 * shape.hidden, 0))), *options)[0]


def attention(q, k, v, *, shape):
    return F.scaled_dot_product_attention(*(a.transpose(1, 2) for a in (q, k, v))).transpose(1, 2)


def bert_layer(x, *parameters, shape):
    (w_q, b_q, w_k, b_k, w_v, b_v, w_o, b_o, w_1, b_1, w_2, b_2, *norms) = parameters
    heads = *x.shape[:2], shape.heads, shape.features // shape.heads
    q, k, v = (F.linear(x, w, b).reshape(heads) for w, b in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    mixed = attention(q, k, v, shape=shape).reshape(x.shape)
    x = F.layer_norm(F.linear(mixed, w_o, b_o) + x, x.shape[-1:], *norms[:2], 1e-5)
    return F.layer_norm(F.linear(F.gelu(F.linear(x, w_1, b_1)), w_2, b_2) + x, x.shape[-1:], *norms[2:], 1e-5)


_ACTIVATIONS = {"none": lambda z: z, "relu": torch.Tensor.relu_, "silu": F.silu, "gelu": F.gelu}
_LAYERS = {
    "conv": conv_bias_activation,
    "dense": dense_activation,
    "batch_norm": batch_norm_add_activation,
    "norm": norm_activation,
    "recurrent": recurrent,
}


def layer(case):
    if case.kind == "transformer":
        return partial(bert_layer if case.shape.inner else attention, shape=case.shape)
    return partial(_LAYERS[case.kind], shape=case.shape)


def images(case):
    """Whether it takes images, which lie channels last but are counted channels first."""
    return case.kind in IMAGES or (case.kind == "norm" and case.shape.norm == "group")


def to_torch(tensor, name, images):
    """As PyTorch lays it out: channels of images and filters first, matrices of weights transposed."""
    if tensor.ndim == 2 and name.startswith("w"):
        return tensor.T.contiguous()
    if not images or tensor.ndim < 3:
        return tensor
    *first, last = range(tensor.ndim)
    tensor = tensor.permute((last, last - 1, *first[:-1]) if name == "w" else (0, last, *first[1:]))
    return tensor.contiguous(memory_format=torch.channels_last if tensor.ndim == 4 else torch.contiguous_format)


def from_torch(tensor, name, images):
    """In JAX's layout, from that of `to_torch`; a gradient's name begins with d."""
    if tensor.ndim == 2 and name.startswith("dw"):
        return tensor.T
    if not images or tensor.ndim < 3:
        return tensor
    spatial = range(2, tensor.ndim)
    return tensor.permute((*spatial, 1, 0) if name == "dw" else (0, *spatial, 1))


def optimizer(rule, parameters, fused):
    if rule == "adamw":
        return torch.optim.AdamW(parameters, 1e-3, weight_decay=1e-4, fused=fused)
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9, weight_decay=1e-4, fused=fused)
