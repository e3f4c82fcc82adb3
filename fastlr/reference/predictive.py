"""The Fisher matrices of predictive distributions, by enumeration or in one line: the truth for ``fastlr.predictive``.

All of them are ``F = E_{y ~ P(.|z)} [grad_z log P(y|z) grad_z log P(y|z)^T]`` at the output z of one sample, float64.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor


def categorical_fisher(logits: Tensor) -> Tensor:
    """Fisher matrix [C, C] of softmax(logits [C]), summed label by label: sum_y p_y (e_y - p) (e_y - p)^T."""
    p = logits.double().softmax(-1)
    scores = torch.eye(len(p), dtype=torch.float64) - p
    return torch.einsum("y,yi,yj->ij", p, scores, scores)


def bernoulli_fisher(logits: Tensor) -> Tensor:
    """Fisher matrix [E, E] of independent labels with P(y = 1) = sigmoid(logits [E]), over all 2^E labelings."""
    p = torch.sigmoid(logits.double())
    fisher = torch.zeros(len(p), len(p), dtype=torch.float64)
    for labels in product((0.0, 1.0), repeat=len(p)):
        y = torch.tensor(labels, dtype=torch.float64)
        fisher += torch.where(y == 1, p, 1 - p).prod() * torch.outer(y - p, y - p)
    return fisher


def gaussian_fisher(size: int, sigma: float) -> Tensor:
    """Fisher matrix [E, E] of N(z, sigma^2 I) with respect to z: I / sigma^2."""
    return torch.eye(size, dtype=torch.float64) / sigma**2


def householder_root(p: Tensor) -> Tensor:
    """Square root R [C, C] of diag(p) - p p^T: R R^T equals it, and column argmax(p) is zero.

    R = diag(s) H with s = sqrt(p) and H the Householder reflection of s to minus the axis k = argmax p, whose column k
    is -s and would give diag(s) (-s) = -p; leaving that column out subtracts p p^T.
    """
    s = p.double().sqrt()
    k = int(p.argmax())
    u = s.clone()
    u[k] += 1.0  # s - (-e_k); <u, u> = 2 (1 + s_k)
    reflection = torch.eye(len(s), dtype=torch.float64) - torch.outer(u, u) / (1.0 + s[k])
    root = torch.diag(s) @ reflection
    root[:, k] = 0.0
    return root


def expected_sq_norm(jacobian: Tensor, fisher: Tensor) -> Tensor:
    """Label expectation of the squared score of one sample, tr(J^T F J), from J = dz/dtheta [outputs, parameters]."""
    return torch.einsum("ip,ij,jp->", jacobian.double(), fisher, jacobian.double())


def local_redundancy_per_sample(jacobians: Tensor, logits: Tensor) -> Tensor:
    """E_y ||grad log P(y|x)||^2 of each sample, [B]: softmax outputs [B, C], Jacobians [B, C, parameters]."""
    return torch.stack([expected_sq_norm(j, categorical_fisher(z)) for j, z in zip(jacobians, logits, strict=True)])
