"""Fisher matrices of predictive distributions, the truth that the predictives are tested against.

All of them are ``F = E_{y ~ P(.|z)} [grad_z log P(y|z) grad_z log P(y|z)^T]`` at the output z of
one sample, float64.
"""

from __future__ import annotations

from itertools import product

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor


def categorical_fisher(logits: Tensor) -> Tensor:
    """Return the Fisher matrix [C, C] of softmax(logits [C]), summed label by label.

    It is sum_y p_y (e_y - p) (e_y - p)^T.
    """
    p = logits.double().softmax(-1)
    scores = torch.eye(len(p), dtype=torch.float64) - p
    return torch.einsum("y,yi,yj->ij", p, scores, scores)


def bernoulli_fisher(logits: Tensor) -> Tensor:
    """Return the Fisher matrix [E, E] of independent labels, summed over all 2^E labelings.

    P(y = 1) = sigmoid(logits [E]).
    """
    p = torch.sigmoid(logits.double())
    fisher = torch.zeros(len(p), len(p), dtype=torch.float64)
    for labels in product((0.0, 1.0), repeat=len(p)):
        y = torch.tensor(labels, dtype=torch.float64)
        fisher += torch.where(y == 1, p, 1 - p).prod() * torch.outer(y - p, y - p)
    return fisher


def gaussian_fisher(size: int, sigma: float) -> Tensor:
    """Fisher matrix [E, E] of N(z, sigma^2 I) with respect to z: I / sigma^2."""
    return torch.eye(size, dtype=torch.float64) / sigma**2


def diagonal_gaussian_fisher(output: Tensor) -> Tensor:
    """Fisher matrix [2A, 2A] of N(mean, diag(deviation^2)) at output = (mean, log deviation).

    The scores' products are averaged over labels by Gauss-Hermite quadrature, action by action.
    """
    _, log_deviation = output.double().chunk(2)
    points, weights = (torch.from_numpy(v) for v in hermegauss(8))
    scores = []
    for deviation in log_deviation.exp():
        label = deviation * points  # less the mean
        scores.append((label / deviation**2, label**2 / deviation**2 - 1))
    size = len(scores)
    fisher = torch.zeros(2 * size, 2 * size, dtype=torch.float64)
    for k, both in enumerate(scores):  # labels are independent, and scores have mean zero
        for i, left in zip((k, size + k), both):
            for j, right in zip((k, size + k), both):
                fisher[i, j] = (weights * left * right).sum() / weights.sum()
    return fisher
