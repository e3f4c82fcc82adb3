"""Per-sample weight gradients of convolutions and their norms in fast plain torch.

The form of the computation is chosen from the shapes.

As in fastlr.ops.linear, low-precision inputs are raised to float32 before products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from operator import ge

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.linear import CACHED, chunks, linear_sq_norms, raised, square_sum

# Of one sample's input: below, calls for each sample cost more than a copy of the batch.
FEW_BYTES = 1 << 19
aten = torch.ops.aten


def conv_grads(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, O, *spatial']
    weight: Tensor,  # [O, C / groups, *kernel]
    geometry: ConvGeometry,
) -> Tensor:  # [B, *weight.shape]
    """Weight gradient of each sample of a convolution.

    Args:
        x: inputs ``[B, K, C, *spatial]``; each sample owns K images.
        g: output gradients ``[B, K, O, *spatial']``.
        weight: the weight, for its shape ``[O, C/groups, *kernel]`` (``[C, O/groups, *kernel]`` if
            transposed).
        geometry: stride, padding, dilation, transposition and groups.

    Returns:
        ``[B, *weight.shape]`` in the dtype of ``g``.
    """
    # torch's own is wrong for some grouped convolutions whose channels are last in memory
    x, g, weight = x.contiguous(), g.contiguous(), weight.to(g.dtype).contiguous()
    return torch.stack([_library(xb, gb, weight, geometry) for xb, gb in zip(x, g, strict=True)])


def conv_sq_norms(
    x: Tensor,  # [B, K, C, *spatial]
    g: Tensor,  # [B, K, O, *spatial']
    weight: Tensor,  # [O, C / groups, *kernel]
    geometry: ConvGeometry,
) -> Tensor:  # [B]
    """Return the squared norm [B] of each sample's convolution weight gradient, in float64.

    The arguments are as in `conv_grads`.

    The shapes choose how it is computed: as a matrix product, by Gram matrices, or from the
    gradients themselves.
    """
    x, g = raised(x), raised(g)
    kernel = tuple(weight.shape[2:])
    if geometry.transposed:
        x, g, geometry = g, x, geometry.forward()
    groups = geometry.groups
    images, channels = x.shape[1:3]
    meets_none_twice = all(map(ge, geometry.stride, kernel)) and not any(geometry.padding)
    if meets_none_twice and (prod(kernel) == 1 or groups == prod(geometry.dilation) == 1):
        x = _patches(x, kernel, geometry.stride)
        return linear_sq_norms(_grouped_rows(x, groups), _grouped_rows(g, groups))
    shape = torch.Size((g.shape[2], channels // groups, *kernel))
    if images > 1:
        like = weight.new_empty(shape, dtype=g.dtype)
        return torch.cat(
            [
                square_sum(_library(xb, gb, like, geometry)[None])
                for xb, gb in zip(x, g, strict=True)
            ]
        )
    x, g = x[:, 0], g[:, 0]
    if groups == 1 and gram_pays(x, g, shape, geometry):
        ranges = gram_ranges(x, g, geometry)
        return torch.cat([conv_gram(x[lo:hi], g[lo:hi], kernel, geometry) for lo, hi in ranges])
    return torch.cat([square_sum(grads) for _, _, grads in weight_grads(x, g, shape, geometry)])


def weight_grads(
    x: Tensor,  # [B, C, *spatial]
    g: Tensor,  # [B, O, *spatial']
    shape: torch.Size,
    geometry: ConvGeometry,
) -> Iterator[tuple[int, int, Tensor]]:
    """Weight gradients of each sample, some samples at a time.

    Args:
        x: inputs [B, C, *spatial].
        g: output gradients [B, O, *spatial'], same dtype.
        shape: Shape of the weight, [O, C / groups, *kernel].
        geometry: not transposed.

    Yields:
        (lo, hi, gradients of samples lo..hi [hi - lo, O, C / groups * kernel size]).
    """
    count, channels = x.shape[:2]
    outputs, kernel, groups = shape[0], tuple(shape[2:]), geometry.groups
    held = chunks(count, shape.numel(), CACHED if x.device.type == "cpu" else None)
    if prod(kernel) == 1 and not any(geometry.padding) and groups == 1:
        x, g = _patches(x, kernel, geometry.stride).flatten(2), g.flatten(2)
        for lo, hi in held:
            yield lo, hi, g[lo:hi] @ x[lo:hi].mT
    elif groups == channels == outputs:
        for lo, hi in chunks(count, 4 * x[0].numel()):
            yield lo, hi, depthwise_grads(x[lo:hi], g[lo:hi], kernel, geometry).flatten(2)
    elif _channels_last(x) and x[0].numel() * x.element_size() >= FEW_BYTES:
        like = x.new_empty(shape)
        for lo, hi in held:
            grads = [_library(x[b : b + 1], g[b : b + 1], like, geometry) for b in range(lo, hi)]
            yield lo, hi, torch.stack(grads).flatten(2)
    else:  # samples as groups: a few keep all cores busy
        step = 4 if channels // groups >= 16 else 1
        for lo in range(0, count, step):
            hi = min(count, lo + step)
            merged = hi - lo
            like = x.new_empty(merged * outputs, *shape[1:])
            grouped = geometry._replace(groups=merged * groups)
            yield (
                lo,
                hi,
                _library(_merged(x[lo:hi]), _merged(g[lo:hi]), like, grouped).reshape(
                    merged, outputs, -1
                ),
            )


def _library(x: Tensor, g: Tensor, like: Tensor, geometry: ConvGeometry) -> Tensor:
    """Return a whole batch's weight gradient, as PyTorch's convolution backward computes it.

    From x [B, C, *] and g [B, O, *]; its shape is that of ``like``, [O, C / groups, *kernel].
    """
    return aten.convolution_backward(g, x, like, None, *geometry, [False, True, False])[1]


def _channels_last(t: Tensor) -> bool:
    return (
        t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
    )


def _patches(x: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """[*, C, *spatial] -> [*, C * kernel size, *positions]: what is met at each position.

    With a kernel of one, and in a vision transformer's first layer, no pixel is met twice.
    """
    axes = len(kernel)
    first = x.ndim - axes
    for axis, (size, step) in enumerate(zip(kernel, stride, strict=True), first):
        x = x.unfold(axis, size, step)  # [*, C, *positions, *kernel] in the end
    for _ in kernel:
        x = x.movedim(-1, first)
    return x.flatten(first - 1, first + axes - 1)


def _grouped_rows(t: Tensor, groups: int) -> Tensor:
    """[B, K, C, *spatial] -> [B, groups, K * positions, C / groups]."""
    count, images, channels = t.shape[:3]
    t = t.reshape(count, images, groups, channels // groups, -1)
    return t.permute(0, 2, 1, 4, 3).flatten(2, 3)


# -- depthwise
# --------------------------------------------------------------------------------------------------


def depthwise_grads(
    x: Tensor,  # [B, C, *spatial]
    g: Tensor,  # [B, C, *spatial']
    kernel: Sequence[int],
    geometry: ConvGeometry,
) -> Tensor:  # [B, C, *kernel]
    """Weight gradients of a depthwise convolution of ``x`` with output gradients ``g``.

    A small kernel by the library's own weight gradient: one call for each sample where samples are
    large and the channels last, else the samples become channels of one call. For more taps the
    gradient is had as the convolution of the input with the output gradient for a kernel, where
    stride and dilation change roles: 10 to 60 times faster on a CPU at 5x5; sample by sample or in
    one call, as before.
    """
    if g.device.type != "cpu":
        return _depthwise_taps(x, g, kernel, geometry)
    count, channels = x.shape[:2]
    sample_by_sample = _channels_last(x) and x[0].numel() * x.element_size() >= FEW_BYTES
    groups = channels if sample_by_sample else count * channels
    if prod(kernel) > 9:
        exchanged = geometry._replace(
            stride=geometry.dilation, dilation=geometry.stride, groups=groups
        )
        if sample_by_sample:
            pairs = [(x[b : b + 1], g[b, :, None]) for b in range(count)]
        else:
            pairs = [(_merged(x), _merged(g)[0, :, None])]
        grads = torch.cat(
            [aten.convolution(image, weight, None, *exchanged) for image, weight in pairs]
        )
        for axis, k in enumerate(kernel):
            grads = grads.narrow(2 + axis, 0, k)
    else:
        like = x.new_empty(groups, 1, *kernel)
        if sample_by_sample:
            pairs = [(x[b : b + 1], g[b : b + 1]) for b in range(count)]
        else:
            merge = _merged_channels_last if _channels_last(x) else _merged
            pairs = [(merge(x), merge(g))]
        grouped = geometry._replace(groups=groups)
        grads = torch.cat([_library(image, grad, like, grouped) for image, grad in pairs])
    return grads.reshape(count, channels, *kernel)


def _merged(t: Tensor) -> Tensor:
    """[B, C, *spatial] -> [1, B * C, *spatial]."""
    return t.reshape(1, t.shape[0] * t.shape[1], *t.shape[2:])


def _merged_channels_last(t: Tensor) -> Tensor:
    """[B, C, H, W] -> [1, B * C, H, W], channels last."""
    count, channels, high, wide = t.shape
    return t.permute(2, 3, 0, 1).reshape(1, high, wide, count * channels).permute(0, 3, 1, 2)


def _depthwise_taps(
    x: Tensor,
    g: Tensor,
    kernel: Sequence[int],
    geometry: ConvGeometry,
) -> Tensor:
    """`depthwise_grads` with one product and one sum for each tap."""
    padded = F.pad(x, [p for axis in reversed(geometry.padding) for p in (axis, axis)])
    parts = []
    for tap in product(*map(range, kernel)):
        seen = padded[(slice(None),) * 2 + _met(tap, geometry, g.shape[2:])]
        parts.append((seen * g).flatten(2).sum(2))
    return torch.stack(parts, 2).reshape(*x.shape[:2], *kernel)


def _met(tap: Sequence[int], geometry: ConvGeometry, size: Sequence[int]) -> tuple[slice, ...]:
    """Return where a tap meets a padded image, for outputs of this size."""
    axes = zip(tap, geometry.dilation, geometry.stride, size, strict=True)
    return tuple([slice(k * d, k * d + (n - 1) * s + 1, s) for k, d, s, n in axes])


# -- Gram matrices of pixels
# --------------------------------------------------------------------------------------------


def _pixels(x: Tensor, geometry: ConvGeometry) -> int:
    """Pixels of a padded image."""
    return prod(n + 2 * p for n, p in zip(x.shape[2:], geometry.padding, strict=True))


def gram_pays(
    x: Tensor,  # [B, C, *spatial]
    g: Tensor,  # [B, O, *spatial']
    shape: torch.Size,
    geometry: ConvGeometry,
) -> bool:
    """Return True if inner products of pixels cost less than gradients (2d, one group).

    That is so for few positions and many channels.
    """
    if len(shape) != 4 or x.shape[1] != shape[1]:
        return False
    positions, outputs, fan_in, channels = prod(g.shape[2:]), shape[0], prod(shape[1:]), shape[1]
    pixels = _pixels(x, geometry)
    taps = fan_in // channels
    return (
        pixels * pixels * channels + positions * positions * (outputs + taps)
        < positions * fan_in * outputs
    )


def gram_ranges(x: Tensor, g: Tensor, geometry: ConvGeometry) -> list[tuple[int, int]]:
    """Ranges of samples whose Gram matrices are held at once."""
    return chunks(len(x), _pixels(x, geometry) ** 2 + 2 * prod(g.shape[2:]) ** 2)


def conv_gram(
    x: Tensor,  # [B, C, H, W]
    g: Tensor,  # [B, O, H', W']
    kernel: Sequence[int],
    geometry: ConvGeometry,
) -> Tensor:  # [B], float64
    """Return `_gram` of a 2d convolution [B, C, H, W] without unfolding the input.

    Inner products of patches are sums of inner products of pixels.

    With P = X^T X over the pixels of the padded image, <patch_t, patch_s> = sum over taps of P[t +
    tap, s + tap]. Pixels and gradients are centred by channel first, as in `_gram`.
    """
    count, outputs = g.shape[:2]
    size = g.shape[2:]
    above, left = geometry.padding
    x = F.pad(x, (left, left, above, above))
    mean_x, mean_g = x.mean((2, 3)), g.mean((2, 3))
    high, wide = x.shape[2:]
    taps = [_met(tap, geometry, size) for tap in product(*map(range, kernel))]
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
    # in float32 the products of small ones would be zero
    inner = (patches.view(count, -1).double() * (g.mT @ g).view(count, -1)).sum(1)
    cross = (along.flatten(1).double() * (mean_g[:, None] @ g)[:, 0]).sum(1)
    common = total.flatten(1).double().square().sum(1) * mean_g.double().square().sum(1)
    return inner + 2 * cross + common
