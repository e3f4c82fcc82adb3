"""Fast plain torch for the ops of fastlr.reference.norms, same names and signatures, the form chosen by cost from shapes.

Low-precision inputs are raised to float32 before products, so that sums are accumulated in float32 at least. The choice
depends on shapes alone: the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
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
    return torch.linalg.vector_norm(t.flatten(1), dim=1).double().square()


def linear_sq_norms(a: Tensor, g: Tensor) -> Tensor:
    """See fastlr.reference.norms.linear_sq_norms. Three forms: one row, Gram matrices, or the product itself."""
    a, g = _raise(a), _raise(g)
    count, groups, rows, inputs = a.shape
    outputs = g.shape[-1]
    if rows == 1:
        return (a.square().sum(-1) * g.square().sum(-1)).double().sum((1, 2))
    direct, gram = rows * inputs * outputs, rows * rows * (inputs + outputs)
    if gram < direct:
        parts = [_gram(a[lo:hi], g[lo:hi]) for lo, hi in _chunks(count, 2 * groups * rows * rows)]
    else:
        large, small = (g, a) if outputs >= inputs else (a, g)  # the BLAS prefers the longer side as rows
        ranges = _chunks(count, groups * inputs * outputs)
        parts = [_square_sum(large[lo:hi].mT @ small[lo:hi]) for lo, hi in ranges]
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


def _conv_gram(
    x: Tensor, g: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """`_gram` of a 2d convolution [B, C, H, W] without unfolding: patches' inner products are sums of pixels' ones.

    With P = X^T X over the pixels of the padded image, <patch_t, patch_s> = sum over taps of P[t + tap, s + tap]. Pixels
    and gradients are centred by channel first, as in `_gram`.
    """
    count, outputs = g.shape[:2]
    size = g.shape[2:]
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    mean_x, mean_g = x.mean((2, 3)), g.mean((2, 3))
    high, wide = x.shape[2:]
    taps = [
        tuple(slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, n, s in zip(tap, dilation, size, stride, strict=True))
        for tap in ((i, j) for i in range(kernel[0]) for j in range(kernel[1]))
    ]
    seen = x.new_zeros(len(taps), high, wide)  # which pixels a tap meets
    for k, (rows, columns) in enumerate(taps):
        seen[k, rows, columns] = 1
    total = (x.flatten(2) @ seen.flatten(1).T).mT  # [B, taps, C]: sum of the patches
    x = (x - mean_x[:, :, None, None]).flatten(2)
    g = (g - mean_g[:, :, None, None]).flatten(2)
    pixels = (x.mT @ x).view(count, high, wide, high, wide)
    with_total = (total @ x).view(count, -1, high, wide)
    patches = x.new_zeros(count, *size, *size)
    along = x.new_zeros(count, *size)  # centred patch_t . sum of patches
    for k, (rows, columns) in enumerate(taps):
        patches += pixels[:, rows, columns, rows, columns]
        along += with_total[:, k, rows, columns]
    inner = (patches.view(count, -1) * (g.mT @ g).view(count, -1)).sum(1, dtype=torch.float64)
    cross = (along.flatten(1) * (mean_g[:, None] @ g)[:, 0]).sum(1, dtype=torch.float64)
    common = total.flatten(1).double().square().sum(1) * mean_g.double().square().sum(1)
    return inner + 2 * cross + common


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
    """See fastlr.reference.norms.conv_sq_norms. By shape: as a matrix product, depthwise, or one sample at a time."""
    x, g = _raise(x), _raise(g)
    kernel = tuple(weight.shape[2:])
    none = [0] * len(kernel)
    if transposed:  # the gradient of the weight is the same with input and output gradient exchanged
        x, g = g, x
    count, images, channels = x.shape[:3]
    outputs = g.shape[2]
    if prod(kernel) == 1 and not any(padding):
        for axis, (n, s) in enumerate(zip(g.shape[3:], stride, strict=True)):
            x = x.narrow(3 + axis, 0, (n - 1) * s + 1)[(slice(None),) * (3 + axis) + (slice(None, None, s),)]
        return linear_sq_norms(_grouped_rows(x, groups), _grouped_rows(g, groups))
    if groups == channels == outputs and images == 1:
        shape = (kernel, stride, padding, dilation)
        ranges = _chunks(count, 4 * x[0].numel())
        return torch.cat([_square_sum(_depthwise_grads(x[lo:hi, 0], g[lo:hi, 0], *shape)) for lo, hi in ranges])
    if groups == 1 and images == 1 and len(kernel) == 2:
        positions, fan_in = prod(g.shape[3:]), channels * prod(kernel)
        pixels = prod(n + 2 * p for n, p in zip(x.shape[3:], padding, strict=True))
        if (
            pixels * pixels * channels + positions * positions * (outputs + fan_in // channels)
            < positions * fan_in * outputs
        ):
            options = (kernel, stride, padding, dilation)
            ranges = _chunks(count, pixels * pixels + 2 * positions * positions)
            return torch.cat([_conv_gram(x[lo:hi, 0], g[lo:hi, 0], *options) for lo, hi in ranges])
    step = 4 if images == 1 and channels // groups >= 16 else 1  # samples as groups: a few keep all cores busy
    rest = (stride, padding, dilation, False, none)
    parts = []
    for lo in range(0, count, step):
        hi = min(count, lo + step)
        merged = hi - lo
        like = weight.new_empty(merged * outputs, channels // groups, *kernel)
        xs, gs = (t[lo:hi].transpose(0, 1).reshape(images, merged * t.shape[2], *t.shape[3:]) for t in (x, g))
        parts.append(_square_sum(_weight_grad(xs, gs, like, *rest, merged * groups).view(merged, -1)))
    return torch.cat(parts)


def _weight_grad(x: Tensor, g: Tensor, like: Tensor, *options: object) -> Tensor:
    """Weight gradient of a whole batch by the library: x [B, C, *], g [B, O, *], like [O, C / groups, *kernel]."""
    return torch.ops.aten.convolution_backward(g, x, like, None, *options, [False, True, False])[1]


def _depthwise_grads(
    x: Tensor,
    g: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Weight gradients [B, C, *kernel] of a depthwise convolution: samples become channels.

    A small kernel by the library's own weight gradient. For more taps the gradient is had as the convolution of the input
    with the output gradient for a kernel, where stride and dilation change roles: 10 to 60 times faster on a CPU at 5x5.
    """
    count, channels = x.shape[:2]
    merged = count * channels
    one, weight = x.reshape(1, merged, *x.shape[2:]), g.reshape(merged, 1, *g.shape[2:])
    none = [0] * len(kernel)
    if g.device.type != "cpu":
        return _depthwise_taps(x, g, kernel, stride, padding, dilation)
    if prod(kernel) > 9:
        grads = torch.ops.aten.convolution(one, weight, None, dilation, padding, stride, False, none, merged)
        for axis, k in enumerate(kernel):
            grads = grads.narrow(2 + axis, 0, k)
    else:
        like = weight.new_empty(merged, 1, *kernel)
        out = g.reshape(1, merged, *g.shape[2:])
        grads = _weight_grad(one, out, like, stride, padding, dilation, False, none, merged)
    return grads.reshape(count, channels, *kernel)


def _depthwise_taps(
    x: Tensor,
    g: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """`_depthwise_grads` with one product and one sum for each tap."""
    padded = F.pad(x, [p for axis in reversed(list(padding)) for p in (axis, axis)])
    parts = []
    for tap in product(*(range(k) for k in kernel)):
        seen = padded
        for axis, (k, d, s, n) in enumerate(zip(tap, dilation, stride, g.shape[2:], strict=True)):
            seen = seen[(slice(None),) * (2 + axis) + (slice(k * d, k * d + (n - 1) * s + 1, s),)]
        parts.append((seen * g).flatten(2).sum(2))
    return torch.stack(parts, 2).reshape(*x.shape[:2], *kernel)


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
            for lo, hi in _chunks(count, 2 * rows * rows)
        ]
    )


def channel_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.norms.channel_sums. Both sums in one pass, by the backward of an identity batch norm."""
    x, g = _raise(x), _raise(g)
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
    x, g = _raise(x), _raise(g)
    normal = (x - mean.to(x.dtype)) * rstd.to(x.dtype)
    return normal.mul_(g).sum(1), g.sum(1)
