"""The networks of models.py in PyTorch."""

import torch
from torch import nn

from . import inputs
from .cases import EFFICIENTNET_B0, MOBILENET_V2
from .transformers_torch import Bert, ViT


def conv_norm(inputs, outputs, kernel, stride=1, groups=1, activation=None):
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([activation(inplace=True)] if activation else []))


class Bottleneck(nn.Module):
    def __init__(self, inputs, features, stride):
        super().__init__()
        outputs = 4 * features
        self.branch = nn.Sequential(
            conv_norm(inputs, features, 1, activation=nn.ReLU),
            conv_norm(features, features, 3, stride, activation=nn.ReLU),
            conv_norm(features, outputs, 1),
        )
        self.shortcut = conv_norm(inputs, outputs, 1, stride) if inputs != outputs or stride != 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.branch(x)
        y += self.shortcut(x)
        return self.relu(y)


class InvertedResidual(nn.Module):
    def __init__(self, inputs, features, expansion, stride):
        super().__init__()
        hidden = expansion * inputs
        self.branch = nn.Sequential(
            *([conv_norm(inputs, hidden, 1, activation=nn.ReLU6)] if expansion > 1 else []),
            conv_norm(hidden, hidden, 3, stride, groups=hidden, activation=nn.ReLU6),
            conv_norm(hidden, features, 1),
        )
        self.adds = stride == 1 and inputs == features

    def forward(self, x):
        return x + self.branch(x) if self.adds else self.branch(x)


class SqueezeExcitation(nn.Module):
    def __init__(self, features, squeezed):
        super().__init__()
        layers = nn.AdaptiveAvgPool2d(1), nn.Conv2d(features, squeezed, 1), nn.SiLU(), nn.Conv2d(squeezed, features, 1), nn.Sigmoid()
        self.weights = nn.Sequential(*layers)

    def forward(self, x):
        return x * self.weights(x)


class MBConv(nn.Module):
    def __init__(self, inputs, features, expansion, stride, size):
        super().__init__()
        hidden = expansion * inputs
        self.branch = nn.Sequential(
            *([conv_norm(inputs, hidden, 1, activation=nn.SiLU)] if expansion > 1 else []),
            conv_norm(hidden, hidden, size, stride, groups=hidden, activation=nn.SiLU),
            SqueezeExcitation(hidden, inputs // 4),
            conv_norm(hidden, features, 1),
        )
        self.adds = stride == 1 and inputs == features

    def forward(self, x):
        return x + self.branch(x) if self.adds else self.branch(x)


class ChannelNorm(nn.Module):
    """A layer norm of the channels of images."""

    def __init__(self, features):
        super().__init__()
        self.norm = nn.LayerNorm(features, eps=1e-6)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.depthwise = nn.Conv2d(features, features, 7, padding=3, groups=features)
        layers = nn.LayerNorm(features, eps=1e-6), nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)
        self.pointwise = nn.Sequential(*layers)
        self.scale = nn.Parameter(torch.full((features,), 1e-6))

    def forward(self, x):
        y = self.pointwise(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * y).permute(0, 3, 1, 2)


def head(inputs):
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]


def resnet50():
    layers, inputs = [conv_norm(3, 64, 7, 2, activation=nn.ReLU), nn.MaxPool2d(3, 2, 1)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, 64 * 2**stage, 2 if stage > 0 and block == 0 else 1))
            inputs = 256 * 2**stage
    return nn.Sequential(*layers, *head(inputs))


def mobilenet_v2():
    layers, inputs = [conv_norm(3, 32, 3, 2, activation=nn.ReLU6)], 32
    for expansion, features, blocks, stride in MOBILENET_V2:
        for block in range(blocks):
            layers.append(InvertedResidual(inputs, features, expansion, stride if block == 0 else 1))
            inputs = features
    return nn.Sequential(*layers, conv_norm(inputs, 1280, 1, activation=nn.ReLU6), *head(1280))


def efficientnet_b0():
    layers, inputs = [conv_norm(3, 32, 3, 2, activation=nn.SiLU)], 32
    for expansion, features, blocks, stride, size in EFFICIENTNET_B0:
        for block in range(blocks):
            layers.append(MBConv(inputs, features, expansion, stride if block == 0 else 1, size))
            inputs = features
    return nn.Sequential(*layers, conv_norm(inputs, 1280, 1, activation=nn.SiLU), *head(1280))


def convnext_tiny():
    layers, inputs = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96)], 96
    for stage, (features, blocks) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if stage:
            layers += [ChannelNorm(inputs), nn.Conv2d(inputs, features, 2, 2)]
        layers += [ConvNeXtBlock(features) for _ in range(blocks)]
        inputs = features
    pool, flatten, dense = head(768)
    return nn.Sequential(*layers, pool, flatten, nn.LayerNorm(768, eps=1e-6), dense)


NETWORKS = {
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_b0": efficientnet_b0,
    "convnext_tiny": convnext_tiny,
    "vit_s16": ViT,
    "bert_base": Bert,
}


def network(shape):
    """The network of a case. Raises ArithmeticError for one with other parameters than Flax's."""
    model = NETWORKS[shape.network]()
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != shape.parameters:
        raise ArithmeticError(f"{shape.network} has {found} parameters, expected {shape.parameters}")
    return model


def given(case):
    """What it takes: images, NCHW, or tokens."""
    return torch.from_numpy(inputs.network(case, channels_first=True))


def make_train_step(model, autocast, learning_rate=1e-3):
    """train_step(images, labels) -> loss: softmax cross entropy, SGD with momentum 0.9; bf16 by autocast, the parameters
    staying float32 as in Flax."""
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)

    def train_step(images, labels):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(images)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step
