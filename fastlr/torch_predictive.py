"""Fast plain torch for the ops of fastlr.reference.predictive, same names and signatures."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlr.reference.counter import STREAMS, random_words


def signs(index: Tensor, count: int, seed: int) -> Tensor:
    """Return independent signs [B, count] in float64, 32 of them from a word."""
    words = random_words(seed, index, STREAMS["cotangent"], -(-count // 32))
    bits = (words[..., None] >> torch.arange(32, device=index.device)) & 1
    return bits.flatten(1)[:, :count].double().mul_(2).sub_(1)


def categorical_root(root: Tensor, best: Tensor, xi: Tensor) -> Tensor:
    """Apply the Householder root of diag(p) - p p^T to xi [..., C] with xi = 0 at ``best``; root = sqrt(p)."""
    top = root.gather(-1, best)
    t = (root * xi).sum(-1, keepdim=True)
    return (xi * root).sub_(root.square().mul_(t / (1 + top))).scatter_(-1, best, -top * t)


def categorical_root_cotangent(z: Tensor, index: Tensor, seed: int) -> Tensor:
    """See fastlr.reference.predictive.categorical_root_cotangent."""
    root = (z.double().log_softmax(-1) / 2).exp_()  # sqrt(p), without cancellation
    best = root.argmax(-1, keepdim=True)
    xi = signs(index, root[0].numel(), seed).view(root.shape).scatter_(-1, best, 0.0)
    return categorical_root(root, best, xi)
