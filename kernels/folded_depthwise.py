"""Depthwise folded convolutions: the forward pass; the backward pass is depthwise.py's.

A program makes ROWS rows of the output for a strip of columns and a block of channels. Each input
row is loaded once for each column of the kernel and added to every output row that it meets, held
in registers. Traffic: the input is read once and the output written once, and where the derivative
needs it the activation's input too; the rows and columns that neighbouring programs share are read
again, from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.activation_functions import act_forward, activated
from fastlr.kernels.depthwise import (
    WARPS,
    DepthwiseTile,
    added,
    constants,
    lanes,
    load_row,
    taps_first,
    tile_of,
    window_rows,
    zeros,
)
from fastlr.kernels.depthwise import folded_conv_backward as folded_conv_backward
from fastlr.kernels.launching import INT32, covered, launch, multiple, on_device, tuned, workspace
from fastlr.kernels.moments import alignment, channels_last, empty_output, like
from fastlr.ops.block import Block, Loaded
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.reference.folded import KEEPS_OUTPUT

ROWS = 4


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "strips", "row_tiles"])
def folded_depthwise_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    kept,
    means,
    x_sample,
    x_channel,
    x_row,
    x_column,
    out_sample,
    out_channel,
    out_row,
    out_column,
    channels,
    height,
    width,
    out_height,
    out_width,
    channel_tiles,
    strips,
    row_tiles,
    ACT: tl.constexpr,
    KEEP: tl.constexpr,
    ADD: tl.constexpr,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    BEFORE: tl.constexpr,
    OF_RESIDUAL: tl.constexpr,
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """ROWS x COLUMNS of the output of one block of channels of one sample; ``weight``: [taps, C].

    MEAN: ``out`` is the activation's input, ``means`` the program's part of the mean of the
    activation.
    """
    if ALIGN > 1:
        if LAST:
            channels, x_row, x_column = (
                multiple(channels, ALIGN),
                multiple(x_row, ALIGN),
                multiple(x_column, ALIGN),
            )
            out_row, out_column = multiple(out_row, ALIGN), multiple(out_column, ALIGN)
        x_sample, out_sample = multiple(x_sample, ALIGN), multiple(out_sample, ALIGN)
    program = tl.program_id(0)
    channel_tile, rest = program % channel_tiles, program // channel_tiles
    strip, rest = rest % strips, rest // strips
    first, sample = rest % row_tiles * ROWS, (rest // row_tiles).to(tl.int64)
    channel = channel_tile * CHANNELS + tl.arange(0, CHANNELS)
    has_channel = channel < channels
    column = strip * COLUMNS + tl.arange(0, COLUMNS)
    x += sample * x_sample

    sums = zeros(ROWS, COLUMNS, CHANNELS)
    for i in tl.static_range((ROWS - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1):
        for s in tl.static_range(KERNEL_W):
            value = load_row(
                x,
                first * STRIDE_H - PADDING_H + i,
                column * STRIDE_W - PADDING_W + s * DILATION_W,
                channel,
                0,
                height,
                width,
                x_row,
                x_column,
                x_channel,
                has_channel,
            )
            value = activated(value, BEFORE).to(tl.float32)
            for r in tl.static_range(KERNEL_H):
                if i >= r * DILATION_H and (i - r * DILATION_H) % STRIDE_H == 0:
                    if (i - r * DILATION_H) // STRIDE_H < ROWS:
                        w = tl.load(
                            weight + (r * KERNEL_W + s) * channels + channel, has_channel, other=0.0
                        )
                        sums = added(
                            sums,
                            (i - r * DILATION_H) // STRIDE_H,
                            value * w.to(tl.float32)[None, :],
                        )

    shift = tl.load(bias + channel, has_channel, other=0.0).to(tl.float32)[None, :]
    base = sample * out_sample
    total = tl.zeros([COLUMNS, CHANNELS], tl.float32)
    for i in tl.static_range(ROWS):
        mask = (column < out_width)[:, None] & has_channel[None, :] & (first + i < out_height)
        at = ((first + i) * out_row + column * out_column)[:, None] + (channel * out_channel)[
            None, :
        ]
        pre = sums[i] + shift
        if ADD:
            pre += activated(tl.load(residual + base + at, mask, other=0.0), OF_RESIDUAL).to(
                tl.float32
            )
        if KEEP:
            tl.store(kept + base + at, pre.to(kept.dtype.element_ty), mask)
        after = act_forward(pre, ACT)
        if MEAN:
            total += tl.where(mask, after, 0.0)
            after = pre
        tl.store(out + base + at, after.to(out.dtype.element_ty), mask)
    if MEAN:
        part = (sample * row_tiles + first // ROWS) * strips + strip
        tl.store(
            means + part * channels + channel,
            tl.sum(total, 0) / (out_height * out_width),
            has_channel,
        )


@tuned("columns", "channels")
def forward_tile(
    dtype: torch.dtype,
    kernel: Sequence[int],
    columns: int,
    channels: int,
    last: bool,
    before: str = "none",
) -> DepthwiseTile:
    """Return the forward kernel's block sizes.

    All taps are held in registers, and the unaligned loads of planes take many.
    """
    state = 70
    if last:
        state = 140 if before in ("none", "relu") else 128
    held = lanes(dtype, prod(kernel) + 2 * ROWS, state)
    return tile_of(32 * WARPS * held, columns, channels, last)


def most_registers(
    dtype: torch.dtype, kernel: Sequence[int], geometry: ConvGeometry, last: bool
) -> int | None:
    """Return the forward kernel's registers a thread where ptxas alone would spill, or None.

    It would spill for occupancy's sake.
    """
    taps = prod(kernel)
    if geometry.stride[1] > 1:
        spills = taps == 25
    else:
        spills = taps == 49 and not last
    return 255 if spills and dtype != torch.float32 else None


def folded_conv(
    x: Loaded, block: Block, residual: Loaded | None, mean: bool
) -> tuple[Tensor, Tensor]:
    """`fastlr.ops.reference.folded.folded_conv` for one channel a group."""
    inputs, geometry = x.tensor, block.geometry
    count, channels, height, width = inputs.shape
    kernel = block.weight.shape[2:]
    size = geometry.output_size((height, width), kernel)
    small = max(kernel) <= 7 and window_rows(kernel, geometry) <= 32 and min(size) >= 1
    if x.gate is not None or not small or not covered(inputs, block.folded):
        return NotImplemented
    if channels * size[0] * size[1] >= INT32:
        return NotImplemented
    out = empty_output(inputs, channels, size)
    keeps_output = mean or block.activation in KEEPS_OUTPUT
    kept = out if keeps_output else torch.empty_like(out)
    last = channels_last(inputs)
    tile = forward_tile(inputs.dtype, kernel, size[1], channels, last, x.activation)
    tiles = (
        triton.cdiv(channels, tile.channels),
        triton.cdiv(size[1], tile.columns),
        triton.cdiv(size[0], ROWS),
    )
    added, of_residual = out, "none"
    if residual is not None:
        added, of_residual = like(residual.tensor, out), residual.activation
    align = alignment(inputs.dtype, True, inputs, out) if last else 1
    parts = tiles[1] * tiles[2] if mean else 0
    means = workspace(count, parts, channels, device=inputs.device)
    with on_device(inputs):
        launch(
            folded_depthwise_kernel,
            count * tiles[0] * tiles[1] * tiles[2],
            inputs,
            taps_first(block.folded),
            block.bias.contiguous(),
            added,
            out,
            kept,
            means,
            *inputs.stride(),
            *out.stride(),
            channels,
            height,
            width,
            *size,
            *tiles,
            ACT=block.activation,
            KEEP=kept is not out,
            ADD=residual is not None,
            LAST=last,
            ALIGN=align,
            **constants(kernel, geometry),
            BEFORE=x.activation,
            OF_RESIDUAL=of_residual,
            MEAN=mean,
            ROWS=ROWS,
            COLUMNS=tile.columns,
            CHANNELS=tile.channels,
            num_warps=WARPS,
            maxnreg=most_registers(inputs.dtype, kernel, geometry, last),
        )
    if not mean:
        return out, kept
    return out, means.sum(1).to(inputs.dtype)[:, :, None, None]
