"""The networks of models.py in PyTorch."""

import torch
from torch import nn

from .cases import MOBILENET_V2


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


NETWORKS = {"resnet50": resnet50, "mobilenet_v2": mobilenet_v2}


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
