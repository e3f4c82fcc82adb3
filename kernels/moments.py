"""Shared by the folded path's kernels: checks, memory formats, ends of split sums, norms.

Where a sample's weight gradient M is added up by several programs, each writes its part to a
workspace [B, S, K, O] (fp32; K weights an output channel); ``finish_moments_kernel`` adds the parts
in order and squares. Traffic: the parts are written and read once, 8 S K O bytes a sample; the
launchers split only where that is small against the activations. ``finish_norms_kernel`` makes the
squared norms of all parameters from the moments, in float64: one launch a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import launch, on_device, workspace

CHANNELS_A_PROGRAM, WEIGHTS_A_STEP = 32, 32
# Channels that the norms are made of at a time. One warp adds them up without waiting for others.
NORMS_BLOCK, NORMS_WARPS = 256, 1


@triton.jit(do_not_specialize=["splits", "weights"])
def finish_moments_kernel(
    parts,
    weight,
    scale,
    squares,
    inner,
    parts_sums,
    sums,
    splits,
    outputs,
    weights,
    CHANNELS: tl.constexpr,
    WEIGHTS: tl.constexpr,
):
    """Make moments of CHANNELS channels of one sample from parts of M and of the sums of g.

    The parts are [B, S, K, O] and [B, S, O].
    """
    tiles = tl.cdiv(outputs, CHANNELS)
    tile, sample = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    output = tile * CHANNELS + tl.arange(0, CHANNELS)
    exists = output < outputs
    parts += sample * splits * weights * outputs
    parts_sums += sample * splits * outputs
    square = tl.zeros([WEIGHTS, CHANNELS], tl.float32)
    along = tl.zeros([WEIGHTS, CHANNELS], tl.float32)
    for start in range(0, weights, WEIGHTS):
        k = start + tl.arange(0, WEIGHTS)
        mask = (k < weights)[:, None] & exists[None, :]
        product = tl.zeros([WEIGHTS, CHANNELS], tl.float32)
        for part in range(0, splits):
            at = (part * weights + k)[:, None] * outputs + output[None, :]
            product += tl.load(parts + at, mask, other=0.0)
        w = tl.load(weight + output[None, :] * weights + k[:, None], mask, other=0.0).to(tl.float32)
        along += w * product
        square += product * product
    total = tl.zeros([CHANNELS], tl.float32)
    for part in range(0, splits):
        total += tl.load(parts_sums + part * outputs + output, exists, other=0.0)
    s = tl.load(scale + output, exists, other=0.0).to(tl.float32)
    tl.store(squares + tl.program_id(0), tl.sum(tl.sum(square, 0) * s * s))
    tl.store(inner + sample * outputs + output, tl.sum(along, 0), exists)
    tl.store(sums + sample * outputs + output, total, exists)


@triton.jit(do_not_specialize=["samples", "tiles", "inner_tiles", "outputs"])
def finish_norms_kernel(
    norms,
    squares,
    inner,
    sums,
    statistics,
    samples,
    tiles,
    inner_tiles,
    outputs,
    BLOCK: tl.constexpr,
):
    """Squared norms [4, B] of one sample: of weight, bias, gamma and beta."""
    sample = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, tiles, BLOCK):
        weight += tl.load(squares + sample * tiles + start + place, start + place < tiles, 0.0).to(
            tl.float64
        )
    bias, gamma, beta = (
        tl.zeros([BLOCK], tl.float64),
        tl.zeros([BLOCK], tl.float64),
        tl.zeros([BLOCK], tl.float64),
    )
    for start in range(0, outputs, BLOCK):
        output = start + place
        exists = output < outputs
        along = tl.zeros([BLOCK], tl.float64)
        for tile in range(0, inner_tiles):
            along += tl.load(
                inner + (sample * inner_tiles + tile) * outputs + output, exists, 0.0
            ).to(tl.float64)
        total = tl.load(sums + sample * outputs + output, exists, 0.0).to(tl.float64)
        scale = tl.load(statistics + output, exists, 0.0).to(tl.float64)
        rstd = tl.load(statistics + outputs + output, exists, 0.0).to(tl.float64)
        shift = tl.load(statistics + 2 * outputs + output, exists, 0.0).to(tl.float64)
        of_gamma = (along + shift * total) * rstd
        bias += scale * total * scale * total
        gamma += of_gamma * of_gamma
        beta += total * total
    tl.store(norms + sample, tl.sum(weight))
    tl.store(norms + samples + sample, tl.sum(bias))
    tl.store(norms + 2 * samples + sample, tl.sum(gamma))
    tl.store(norms + 3 * samples + sample, tl.sum(beta))


def moments_space(
    x: Tensor, splits: int, weights: int, outputs: int, tiles: int, inner_tiles: int
) -> tuple[Tensor, ...]:
    """Return space for the (squares, inner, sums, parts) of `finish_norms`.

    The sums stand in place of what is not looked at.
    """
    sums = workspace(len(x), splits, outputs, device=x.device)
    if splits > 1:
        return sums, sums, sums, workspace(len(x), splits, weights, outputs, device=x.device)
    inner = workspace(len(x), inner_tiles, outputs, device=x.device)
    return workspace(len(x), tiles, device=x.device), inner, sums, sums


def finish_norms(
    squares: Tensor, inner: Tensor, sums: Tensor, parts: Tensor, weight: Tensor, statistics: Tensor
) -> tuple[Tensor, ...]:
    """Four squared norms [B], float64, as of fastlr.ops.folded.folded_conv_sq_norms.

    Args:
        squares: parts of the weight's squared norms, [B, tiles].
        inner: parts of <W, M>, [B, tiles, O].
        sums: of g, [B, O]; where samples were split its parts, [B, S, O].
        parts: of M, [B, S, K, O], where samples were split: the first two are not looked at then.
            Else the sums.
        weight: contiguous; looked at where samples were split.
        statistics: contiguous [3, O].
    """
    count, outputs, device = len(sums), sums.shape[-1], sums.device
    with on_device(sums):
        if parts is not sums:
            tiles, splits, weights = triton.cdiv(outputs, CHANNELS_A_PROGRAM), *parts.shape[1:3]
            squares, inner, added = (
                workspace(count, n, device=device) for n in (tiles, outputs, outputs)
            )
            launch(
                finish_moments_kernel,
                count * tiles,
                parts,
                weight,
                statistics,
                squares,
                inner,
                sums,
                added,
                splits,
                outputs,
                weights,
                CHANNELS=CHANNELS_A_PROGRAM,
                WEIGHTS=WEIGHTS_A_STEP,
                num_warps=4,
            )
            inner, sums = inner[:, None], added
        norms = torch.empty(4, count, dtype=torch.float64, device=device)
        launch(
            finish_norms_kernel,
            count,
            norms,
            squares,
            inner,
            sums,
            statistics,
            count,
            squares.shape[1],
            inner.shape[1],
            outputs,
            BLOCK=NORMS_BLOCK,
            num_warps=NORMS_WARPS,
        )
    return norms.unbind(0)


def channels_last(t: Tensor) -> bool:
    """Return True if the channels of [B, C, H, W] are adjacent in memory, and the columns not."""
    return t.stride(1) == 1 and t.shape[1] > 1


def empty_output(x: Tensor, channels: int, spatial: Sequence[int]) -> Tensor:
    """Space for [B, channels, *spatial] in the dtype and the memory format of ``x``."""
    memory_format = torch.channels_last if channels_last(x) else torch.contiguous_format
    return torch.empty(
        len(x), channels, *spatial, dtype=x.dtype, device=x.device, memory_format=memory_format
    )


def like(t: Tensor, other: Tensor) -> Tensor:
    """The values of ``t`` with the strides of ``other``: itself if it has them."""
    return t if t.stride() == other.stride() else torch.empty_like(other).copy_(t)


def alignment(dtype: torch.dtype, last: bool, *tensors: Tensor) -> int:
    """Return the elements a vector load may take: 16 bytes where [B, C, H, W] allow it, else 1.

    Sizes and strides of all tensors must allow it.
    """
    wide = 4 if dtype == torch.float32 else 8
    for t in tensors:
        size = t.shape[1] if last else t.shape[2] * t.shape[3]
        inner = 1 if last else 3
        if size % wide or t.stride(inner) != 1:
            return 1
        others = [
            t.stride(i) for i in range(4) if i != inner and t.shape[i] > 1 and (last or i != 2)
        ]
        if any(s % wide for s in others):
            return 1
    return wide
