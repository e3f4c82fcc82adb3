"""Definitions of per-sample sums and squared gradient norms, one sample at a time.

Results are float64, whatever the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastlr.ops.convolution import conv_grads
from fastlr.ops.geometry import ConvGeometry


def linear_sq_norms(
    a: Tensor,  # [B, N, T, I]
    g: Tensor,  # [B, N, T, O]
) -> Tensor:  # [B]
    """See fastlr.ops.linear.linear_sq_norms."""
    return torch.stack(
        [(gb.mT.double() @ ab.double()).square().sum() for ab, gb in zip(a, g, strict=True)]
    )


def dense_sq_norms(
    grads: Tensor,  # [B, ...]
) -> Tensor:  # [B]
    """See fastlr.ops.linear.dense_sq_norms."""
    return grads.double().flatten(1).square().sum(1)


def one_row_sq_norms(
    a: Tensor,  # [B, I]
    g: Tensor,  # [B, O]
) -> tuple[Tensor, Tensor]:  # [B], [B]
    """See fastlr.ops.linear.one_row_sq_norms."""
    return linear_sq_norms(a[:, None, None], g[:, None, None]), dense_sq_norms(g)


def conv_sq_norms(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, O, *spatial']
    weight: Tensor,  # [O, C / groups, *kernel]
    geometry: ConvGeometry,
) -> Tensor:  # [B]
    """See fastlr.ops.convolution.conv_sq_norms."""
    return conv_grads(x.double(), g.double(), weight, geometry).flatten(1).square().sum(1)


def embedding_sq_norms(
    ids: Tensor,  # [B, T]
    g: Tensor,  # [B, T, D]
) -> Tensor:  # [B]
    """See fastlr.ops.linear.embedding_sq_norms."""
    norms = []
    for i, gb in zip(ids, g, strict=True):
        unique, place = i.unique(return_inverse=True)
        table = torch.zeros(len(unique), g.shape[-1], dtype=torch.float64, device=g.device)
        norms.append(table.index_add_(0, place, gb.double()).square().sum())
    return torch.stack(norms)


def channel_sums(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, C, *spatial]
    mean: Tensor | None = None,  # [1, C] or [B, C]
) -> tuple[Tensor, Tensor]:  # [B, C], [B, C]
    """See fastlr.ops.linear.channel_sums."""
    x, g = x.double(), g.double()
    axes = [1, *range(3, x.ndim)]
    if mean is not None:
        x = x - mean.double().view(len(mean), 1, -1, *[1] * (x.ndim - 3))
    return (g * x).sum(axes), g.sum(axes)


def layer_norm_sums(
    x: Tensor,  # [B, T, D]
    g: Tensor,  # [B, T, D]
    mean: Tensor,  # [B, T, 1]
    rstd: Tensor,  # [B, T, 1]
) -> tuple[Tensor, Tensor]:  # [B, D], [B, D]
    """See fastlr.ops.linear.layer_norm_sums."""
    x, g = x.double(), g.double()
    return (g * (x - mean.double()) * rstd.double()).sum(1), g.sum(1)


def rms_norm_sums(
    x: Tensor,  # [B, T, D]
    g: Tensor,  # [B, T, D]
    rrms: Tensor,  # [B, T, 1]
) -> Tensor:  # [B, D]
    """See fastlr.ops.linear.rms_norm_sums."""
    return (g.double() * x.double() * rrms.double()).sum(1)


def broadcast_sums(
    g: Tensor,  # [B, ...]
    other: Tensor | None,  # broadcastable to the shape of g
    axes: Sequence[int],
) -> Tensor:  # [B, *axes of g that are left]
    """See fastlr.ops.linear.broadcast_sums."""
    value = g.double() if other is None else g.double() * other.double()
    return value.sum(list(axes)) if axes else value
