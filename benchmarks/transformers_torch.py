"""The networks of transformers_flax.py in PyTorch."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, features, heads):
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x):
        query, key, value = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.output(y.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, features, heads, norm_first, epsilon):
        super().__init__()
        self.norm_first = norm_first
        self.attention = Attention(features, heads)
        self.mlp = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))
        self.norms = nn.ModuleList(nn.LayerNorm(features, eps=epsilon) for _ in range(2))

    def forward(self, x):
        for norm, layer in zip(self.norms, (self.attention, self.mlp)):
            x = x + layer(norm(x)) if self.norm_first else norm(x + layer(x))
        return x


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 16, 16)
        self.cls = nn.Parameter(torch.zeros(1, 1, 384))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 197, 384))
        self.layers = nn.Sequential(*[EncoderLayer(384, 6, True, 1e-6) for _ in range(12)], nn.LayerNorm(384, eps=1e-6))
        self.head = nn.Linear(384, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)
        x = self.layers(x + self.positions[:, : x.shape[1]])
        return self.head(x[:, 0])


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(30522, 768), nn.Embedding(512, 768)
        self.layers = nn.Sequential(nn.LayerNorm(768, eps=1e-12), *[EncoderLayer(768, 12, False, 1e-12) for _ in range(12)])
        self.head = nn.Sequential(nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 1000))

    def forward(self, tokens):
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.layers(x)[:, 0])
