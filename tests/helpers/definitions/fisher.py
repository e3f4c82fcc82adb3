"""Definition of the cotangents that are drawn by a root of the Fisher matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlr.ops.philox import STREAMS, random_words


def householder_root(s: Tensor) -> Tensor:
    """Return the square root R [C, C] of diag(p) - p p^T, from s = sqrt(p): R R^T equals it.

    R = diag(s) H with H the Householder reflection of s to minus the axis k = argmax p, whose
    column k is -s and would give diag(s) (-s) = -p; leaving that column out subtracts p p^T.
    """
    k = int(s.argmax())
    u = s.clone()
    u[k] += 1.0  # s - (-e_k); <u, u> = 2 (1 + s_k)
    reflection = torch.eye(len(s), dtype=torch.float64) - torch.outer(u, u) / (1.0 + s[k])
    root = torch.diag(s) @ reflection
    root[:, k] = 0.0
    return root


def categorical_root_cotangent(
    z: Tensor,  # [B, P, C]
    index: Tensor,  # [B]
    seed: int,
) -> Tensor:  # [B, P, C]
    """See fastlr.ops.fisher.categorical_root_cotangent."""
    count, positions, classes = z.shape
    element = torch.arange(positions * classes)
    words = random_words(seed, index.cpu(), STREAMS["cotangent"], -(-len(element) // 32))
    signs = 2 * (words[:, element // 32] >> element % 32 & 1).double() - 1
    cotangents = torch.empty(count, positions, classes, dtype=torch.float64)
    for b in range(count):
        for p in range(positions):
            s = (z[b, p].double().log_softmax(0) / 2).exp().cpu()
            cotangents[b, p] = householder_root(s) @ signs[b].view(positions, classes)[p]
    return cotangents.to(z.device)
