"""Models for the tests of metrics: each returns by hand its activations and its features.

Activations have their units last.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from exact import seeded
from torch import nn


class PlainCNN(nn.Module):
    """Convolutions and linear layers, ReLU modules in place; two channels and one unit are dead."""

    size = (3, 9, 9)

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 5, 3, stride=2),
            nn.ReLU(inplace=True),
        )
        self.hidden = nn.Linear(45, 7)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(7, 3)
        for layer, unit in ((self.body[0], 1), (self.body[2], 4), (self.hidden, 2)):
            layer.bias.data[unit] = -100.0

    def forward(self, x):
        return self.head(self.act(self.hidden(self.body(x).flatten(1))))

    def by_hand(self, x):
        a = self.body[0](x).clamp(min=0)
        b = self.body[2](a).clamp(min=0)
        c = self.hidden(b.reshape(len(x), -1)).clamp(min=0)
        return [a.movedim(1, -1), b.movedim(1, -1), c], c


class Residual(nn.Module):
    """Batch norm, functional and in-place relu, one activation used three times, a residual sum."""

    size = (3, 8, 8)

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 4)
        for norm in (self.norm1, self.norm2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
        self.norm1.bias.data[:3] = -100.0

    def forward(self, x):
        x = self.relu(self.norm1(self.first(x)))
        y = F.relu(self.norm2(self.second(x)), inplace=True)
        y = self.relu(self.relu(y - 0.5) + x)
        return F.log_softmax(self.fc(F.adaptive_avg_pool2d(y, 1).flatten(1)), 1)

    def by_hand(self, x):
        a = self.norm1(self.first(x)).clamp(min=0)
        b = self.norm2(self.second(a)).clamp(min=0)
        c = (b - 0.5).clamp(min=0)
        d = (c + a).clamp(min=0)
        return [t.movedim(1, -1) for t in (a, b, c, d)], d.mean((2, 3))


class NewGELU(nn.Module):
    """A formula, as in GPT-2: the tanh inside is no activation of its own."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class GPT(nn.Module):
    """Tokens, causal attention, written-out GELU module, tied head."""

    size = (5,)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.randn(1, 5, 8))
        self.norm1 = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.norm2 = nn.LayerNorm(8)
        self.up = nn.Linear(8, 20)
        self.act = NewGELU()
        self.down = nn.Linear(20, 8)
        self.norm3 = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.up.bias.data[:4] = -100.0

    def forward(self, x):
        return self.head(self.by_hand(x)[1])

    def by_hand(self, x):
        h = self.embed(x) + self.place
        q, k, v = (
            t.view(*x.shape, 2, 4).transpose(1, 2) for t in self.qkv(self.norm1(h)).chunk(3, -1)
        )
        h = h + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        )
        a = self.act(self.up(self.norm2(h)))
        return [a], self.norm3(h + self.down(a))


class Mixed(nn.Module):
    """Hardswish, SiLU and GELU functions on channels, on the last axis (ConvNeXt) and in 1-D.

    The last axis is that of a channels-last block.
    """

    size = (2, 6, 6)

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 10)
        self.line, self.head = nn.Conv1d(10, 5, 3), nn.Linear(5, 3)

    def forward(self, x):
        x = F.hardswish(self.conv(x)).permute(0, 2, 3, 1)
        x = F.gelu(self.inner(self.norm(x))).permute(0, 3, 1, 2)
        x = F.silu(self.line(x.flatten(2)), inplace=True)
        return self.head(x.mean(2))

    def by_hand(self, x):
        a = self.conv(x)
        a = (a * (a + 3).clamp(0, 6) / 6).movedim(1, -1)
        b = self.inner(self.norm(a))
        b = b * torch.special.ndtr(b)
        c = self.line(b.movedim(-1, 1).flatten(2))
        c = c / (1 + (-c).exp())
        return [a, b, c.movedim(1, -1)], c.mean(2)


class Encoder(nn.Module):
    """torch's own transformer layer, which would take a fused path in eval mode, time first."""

    size = (7, 8)

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.layer.linear1.bias.data[5] = -100.0

    def forward(self, x):
        return self.head(self.layer(x)[:, 0])

    def by_hand(self, x):
        layer = self.layer
        h = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
        a = layer.linear1(h).clamp(min=0)
        return [a], layer.norm2(h + layer.linear2(a))[:, 0]


MODELS = [PlainCNN, Residual, GPT, Mixed, Encoder]


def made(kind, dtype=torch.float32):
    torch.manual_seed(3)
    return kind().eval().to(dtype)


def data(kind, n=24, dtype=torch.float32):
    generator = seeded(4)
    if kind is GPT:
        return torch.randint(0, 11, (n, *kind.size), generator=generator)
    return torch.randn(n, *kind.size, generator=generator).to(dtype)


@torch.no_grad()
def scores(model, x):
    """Sokar's score of each unit of each activation, in float64."""
    found = []
    for a in model.by_hand(x)[0]:
        mean = a.double().abs().reshape(-1, a.shape[-1]).mean(0)
        found.append(mean / mean.mean())
    return found


def share(found, threshold):
    return float((torch.cat(found) <= threshold).double().mean())


def between(found):
    """Return a threshold in the widest gap between low scores.

    Rounding cannot move a unit across it.
    """
    values = torch.cat(found).sort().values
    values = values[values > 1e-3][: len(values) // 3]
    at = int(values.diff().argmax())
    return float(values[at : at + 2].mean())


def plain_ranks(features, delta=0.01, epsilon=0.01):
    phi = features.double().reshape(-1, features.shape[-1]).numpy()
    s = np.linalg.svd(phi, compute_uv=False)
    k = next(k for k in range(1, len(s) + 1) if s[:k].sum() >= (1 - delta) * s.sum() * (1 - 1e-13))
    p = s[s > 1e-14 * s[0]] / s.sum()
    return {
        "effective_rank": k,
        "effective_rank_entropy": math.exp(-(p * np.log(p)).sum()),
        "feature_rank": int((s / math.sqrt(len(phi)) > epsilon).sum()),
    }


def labels(kind, n):
    shape = (n, 5) if kind is GPT else (n,)
    return torch.randint(0, 3, shape, generator=seeded(6))


def entropy_loss(z, y):
    return F.cross_entropy(z.movedim(-1, 1), y, reduction="none")
