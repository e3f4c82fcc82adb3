"""Fast plain torch for the ops of fastlr.reference.norms, same names and signatures, the form chosen by cost from shapes.

Low-precision inputs are raised to float32 before products, so that sums are accumulated in float32 at least. The choice
depends on shapes alone: the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 23  # elements of intermediate products held at once
CACHED = 1 << 19  # elements of gradients held at once on a CPU, so that they stay in the cache for their sums


def raised(t: Tensor) -> Tensor:
    """Low precision to float32."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def chunks(count: int, elements: int, block: int | None = None) -> list[tuple[int, int]]:
    """Ranges of samples such that ``elements`` for each stay within ``block`` (default BLOCK)."""
    step = max(1, min(count, (block or BLOCK) // max(1, elements)))
    return [(lo, min(count, lo + step)) for lo in range(0, count, step)]


def square_sum(t: Tensor) -> Tensor:
    """Sum of squares of each sample: [B, ...] -> [B], float64."""
    return torch.linalg.vector_norm(t.flatten(1), dim=1).double().square()


def linear_sq_norms(a: Tensor, g: Tensor) -> Tensor:
    """See fastlr.reference.norms.linear_sq_norms. Three forms: one row, Gram matrices, or the product itself."""
    count, groups, rows, inputs = a.shape
    outputs = g.shape[-1]
    if rows == 1:
        return (raised(a).square().sum(-1) * raised(g).square().sum(-1)).double().sum((1, 2))
    direct, gram = rows * inputs * outputs, rows * rows * (inputs + outputs)
    copied = 0 if a.dtype == g.dtype == raised(g).dtype else groups * rows * (inputs + outputs)  # by raising them
    if gram < direct:
        ranges = chunks(count, max(2 * groups * rows * rows, copied))
        parts = [_gram(raised(a[lo:hi]), raised(g[lo:hi])) for lo, hi in ranges]
    else:
        large, small = (g, a) if outputs >= inputs else (a, g)  # the BLAS prefers the longer side as rows
        ranges = chunks(count, max(groups * inputs * outputs, copied), CACHED if a.device.type == "cpu" else None)
        parts = [square_sum(raised(large[lo:hi]).mT @ raised(small[lo:hi])) for lo, hi in ranges]
    return torch.cat(parts)


def _gram(a: Tensor, g: Tensor) -> Tensor:
    """<A A^T, G G^T> for each sample, summed over groups: the squared norm of G^T A without forming it.

    The narrower side c is centred over the rows: M = sum_t o_t (c_t - mean c)^T + (sum_t o_t)(mean c)^T. Activations after a
    ReLU have a large common part that M hardly sees and that the Gram matrices would square.
    """
    c, o = (a, g) if a.shape[-1] <= g.shape[-1] else (g, a)
    mean = c.mean(2, keepdim=True)
    c = c - mean
    other = o @ o.mT
    along = other.sum(-1)  # o_t . sum of o
    cross = (along * (c @ mean.mT).squeeze(-1)).flatten(1).sum(1, dtype=torch.float64)
    common = (along.sum(-1, dtype=torch.float64) * mean.double().square().sum((2, 3))).sum(1)
    inner = (c @ c.mT).mul_(other).flatten(1).sum(1, dtype=torch.float64)
    return inner + 2 * cross + common


def embedding_sq_norms(ids: Tensor, g: Tensor) -> Tensor:
    """See fastlr.reference.norms.embedding_sq_norms. Rows of one id are added in a fixed order."""
    g = raised(g)
    count, rows, _ = g.shape
    if g.device.type == "cpu":
        number = int(ids.max()) + 1 if ids.numel() else 1
        unique, place = (
            (ids + number * torch.arange(count, device=ids.device)[:, None]).flatten().unique(return_inverse=True)
        )
        table = g.new_zeros(len(unique), g.shape[-1]).index_add_(0, place, g.flatten(0, 1))
        norms = torch.zeros(count, dtype=torch.float64, device=g.device)
        return norms.index_add_(0, unique // number, table.square().sum(1).double())
    return torch.cat(
        [
            (g[lo:hi] @ g[lo:hi].mT)
            .mul_(ids[lo:hi, :, None] == ids[lo:hi, None, :])
            .flatten(1)
            .sum(1, dtype=torch.float64)
            for lo, hi in chunks(count, 2 * rows * rows)
        ]
    )


def channel_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.norms.channel_sums. Both sums in one pass, by the backward of an identity batch norm."""
    x, g = raised(x), raised(g)
    count, images, channels = x.shape[:3]
    if images > 1 or x.ndim == 3:
        axes = [1, *range(3, x.ndim)]
        return (g * x).sum(axes), g.sum(axes)
    one = x.new_ones(count * channels)
    zero = torch.zeros_like(one)
    flat = (t.reshape(1, count * channels, -1) for t in (g, x))
    _, gx, gs = torch.ops.aten.native_batch_norm_backward(
        *flat, one, zero, one, None, None, False, 0.0, [False, True, True]
    )
    return gx.view(count, channels), gs.view(count, channels)


def layer_norm_sums(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.norms.layer_norm_sums."""
    x, g = raised(x), raised(g)
    normal = (x - mean.to(x.dtype)) * rstd.to(x.dtype)
    return normal.mul_(g).sum(1), g.sum(1)


def rms_norm_sums(x: Tensor, g: Tensor, rrms: Tensor) -> Tensor:
    """See fastlr.reference.norms.rms_norm_sums."""
    x, g = raised(x), raised(g)
    return (x * rrms.to(x.dtype)).mul_(g).sum(1)


def broadcast_sums(g: Tensor, other: Tensor | None, axes: Sequence[int]) -> Tensor:
    """See fastlr.reference.norms.broadcast_sums."""
    if other is not None:
        g = raised(g) * other
    if not axes:
        return raised(g)
    return g.sum(list(axes), dtype=torch.promote_types(g.dtype, torch.float32))
