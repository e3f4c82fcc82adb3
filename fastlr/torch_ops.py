"""Fast plain torch for the ops of fastlr.reference.norms, same names and signatures, the form chosen by cost from shapes.

Low-precision inputs are raised to float32 before products, so that sums are accumulated in float32 at least. The choice
depends on shapes alone: the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr.reference.norms import conv_grads as conv_grads

BLOCK = 1 << 23  # elements of intermediate products held at once


def _raise(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _chunks(count: int, elements: int) -> list[tuple[int, int]]:
    step = max(1, min(count, BLOCK // max(1, elements)))
    return [(lo, min(count, lo + step)) for lo in range(0, count, step)]


def _square_sum(t: Tensor) -> Tensor:
    """Sum of squares of each sample: [B, ...] -> [B], float64."""
    flat = t.flatten(1)
    return torch.linalg.vector_norm(flat, dim=1).double().square() if flat.dtype == torch.float64 else flat.square().sum(1).double()


def linear_sq_norms(a: Tensor, g: Tensor) -> Tensor:
    """See fastlr.reference.norms.linear_sq_norms. Three forms: one row, Gram matrices, or the product itself."""
    a, g = _raise(a), _raise(g)
    count, groups, rows, inputs = a.shape
    outputs = g.shape[-1]
    if rows == 1:
        return (a.square().sum(-1) * g.square().sum(-1)).double().sum((1, 2))
    direct, gram = rows * inputs * outputs, rows * rows * (inputs + outputs)
    if gram < direct:
        parts = [
            ((a[lo:hi] @ a[lo:hi].mT).mul_(g[lo:hi] @ g[lo:hi].mT)).flatten(1).sum(1, dtype=torch.float64)
            for lo, hi in _chunks(count, 2 * groups * rows * rows)
        ]
    else:
        parts = [_square_sum(g[lo:hi].mT @ a[lo:hi]) for lo, hi in _chunks(count, groups * inputs * outputs)]
    return torch.cat(parts)


def conv_sq_norms(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """See fastlr.reference.norms.conv_sq_norms."""
    x, g = _raise(x), _raise(g)
    count, images, channels = x.shape[:3]
    kernel = weight.shape[2:]
    if transposed:  # the roles of input and output gradient are exchanged
        x, g, output_padding = g, x, [0] * len(kernel)
        channels = x.shape[2]
    if prod(kernel) == 1 and not any(padding):
        cut = (slice(None),) * 3 + tuple(
            slice(0, (n - 1) * s + 1, s) for n, s in zip(g.shape[3:], stride, strict=True)
        )
        return linear_sq_norms(_grouped_rows(x[cut], groups), _grouped_rows(g, groups))
    positions = images * prod(g.shape[3:])
    fan_in = channels // groups * prod(kernel)
    if groups == 1 and positions * (fan_in + g.shape[2]) < fan_in * g.shape[2] and len(kernel) == 2:
        columns = F.unfold(x.flatten(0, 1), kernel, dilation, padding, stride).view(count, images, fan_in, -1)
        return linear_sq_norms(columns.mT.reshape(count, 1, positions, fan_in), _grouped_rows(g, 1))
    return torch.cat(
        [_square_sum(conv_grads(x[b : b + 1], g[b : b + 1], _like(weight, x, g, groups, kernel), stride, padding, dilation, False, output_padding, groups)) for b in range(count)]
    )


def _like(weight: Tensor, x: Tensor, g: Tensor, groups: int, kernel: Sequence[int]) -> Tensor:
    return weight.new_empty(g.shape[2], x.shape[2] // groups, *kernel)


def _grouped_rows(t: Tensor, groups: int) -> Tensor:
    """[B, K, C, *spatial] -> [B, groups, K * positions, C / groups]."""
    count, images, channels = t.shape[:3]
    t = t.reshape(count, images, groups, channels // groups, -1)
    return t.permute(0, 2, 1, 4, 3).flatten(2, 3)


def embedding_sq_norms(ids: Tensor, g: Tensor) -> Tensor:
    """See fastlr.reference.norms.embedding_sq_norms. Rows of one id are added in a fixed order."""
    g = _raise(g)
    count, rows, _ = g.shape
    if g.device.type == "cpu":
        number = int(ids.max()) + 1 if ids.numel() else 1
        unique, place = (ids + number * torch.arange(count, device=ids.device)[:, None]).flatten().unique(return_inverse=True)
        table = g.new_zeros(len(unique), g.shape[-1]).index_add_(0, place, g.flatten(0, 1))
        norms = torch.zeros(count, dtype=torch.float64, device=g.device)
        return norms.index_add_(0, unique // number, table.square().sum(1).double())
    return torch.cat(
        [
            (g[lo:hi] @ g[lo:hi].mT).mul_(ids[lo:hi, :, None] == ids[lo:hi, None, :]).flatten(1).sum(1, dtype=torch.float64)
            for lo, hi in _chunks(count, 2 * rows * rows)
        ]
    )


def channel_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.norms.channel_sums."""
    x, g = _raise(x), _raise(g)
    axes = [1, *range(3, x.ndim)]
    return (g * x).sum(axes), g.sum(axes)


def layer_norm_sums(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.norms.layer_norm_sums."""
    x, g = _raise(x), _raise(g)
    normal = (x - mean.to(x.dtype)) * rstd.to(x.dtype)
    return normal.mul_(g).sum(1), g.sum(1)
