"""Depthwise folded convolutions: the forward pass; the backward pass is depthwise.py's.

A program walks down at most ROWS rows of the output for a strip of columns and a block of channels.
A thread has places of RUN adjacent columns. In registers it holds the window of input rows that an
output row meets, activated once as they enter from below, and all taps. Traffic: the input is read
once and the output written once, and where the derivative needs it the activation's input too; the
rows and columns that neighbouring places and programs share are read again, from the cache.
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
    DepthwiseTile,
    act_of_row,
    columns_inside,
    constants,
    load_row,
    load_taps,
    most_registers,
    taps_first,
    tile_of,
    window_rows,
    zeros,
)
from fastlr.kernels.depthwise import folded_conv_backward as folded_conv_backward
from fastlr.kernels.launching import INT32, covered, launch, multiple, on_device, tuned
from fastlr.kernels.moments import alignment, channels_last, empty_output, like
from fastlr.ops.activations import KEEPS_OUTPUT
from fastlr.ops.block import Block, Loaded
from fastlr.ops.geometry import ConvGeometry

ROWS = 16  # of the output that a program makes at most


@triton.jit(
    do_not_specialize=["height", "width", "out_height", "out_width", "strips", "segments", "steps"]
)
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
    out_sample,
    out_channel,
    out_row,
    channels,
    height,
    width,
    out_height,
    out_width,
    channel_tiles,
    strips,
    segments,
    steps,
    ACT: tl.constexpr,
    KEEP: tl.constexpr,
    ADD: tl.constexpr,
    LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    X_COLUMN: tl.constexpr,
    OUT_COLUMN: tl.constexpr,
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
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``steps`` rows of the output for a strip of columns and a block of channels.

    ``residual``, ``out`` and ``kept`` have the same strides.

    MEAN: ``out`` is left without the activation, and the activation's mean over the positions goes
    to ``means``, a part from each program.
    """
    if ALIGN > 1:
        if LAST:
            channels = multiple(channels, ALIGN)
            x_row, out_row = multiple(x_row, ALIGN), multiple(out_row, ALIGN)
        x_sample, out_sample = multiple(x_sample, ALIGN), multiple(out_sample, ALIGN)
    PLACES: tl.constexpr = COLUMNS // RUN
    # Rows and columns of the inputs that a place holds.
    SPAN: tl.constexpr = (RUN - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1
    TAPS: tl.constexpr = KERNEL_H * KERNEL_W
    program = tl.program_id(0)
    channel_tile, rest = program % channel_tiles, program // channel_tiles
    strip, rest = rest % strips, rest // strips
    segment, sample = rest % segments, (rest // segments).to(tl.int64)
    channel = channel_tile * CHANNELS + tl.arange(0, CHANNELS)
    has_channel = channel < channels
    place = strip * COLUMNS + tl.arange(0, PLACES) * RUN  # its first output column
    x += sample * x_sample

    taps = load_taps(weight, channel, has_channel, channels, TAPS, PLACES)
    shift = tl.load(bias + channel, has_channel, other=0.0).to(tl.float32)[None, :]
    shift = tl.broadcast_to(shift, PLACES, CHANNELS)
    inside = columns_inside(
        place * STRIDE_W, width, has_channel, RUN * STRIDE_W, -PADDING_W, SPAN - PADDING_W, WHOLE
    )
    out_inside = columns_inside(place, out_width, has_channel, RUN, 0, RUN, WHOLE)
    x += (place * STRIDE_W * X_COLUMN)[:, None] + (channel * x_channel)[None, :]
    out_at = (place * OUT_COLUMN)[:, None] + (channel * out_channel)[None, :]
    out_at += sample * out_sample
    total = tl.zeros([PLACES, CHANNELS], tl.float32)
    first = segment * steps
    top = first * STRIDE_H - PADDING_H
    window = zeros(WINDOW * SPAN, PLACES, CHANNELS)
    for y in range(top, top + WINDOW):
        entering = load_row(x, y, height, x_row, inside, X_COLUMN, -PADDING_W, SPAN - PADDING_W)
        window = window[SPAN:] + act_of_row(entering, SPAN, BEFORE)
    for row in range(first, tl.minimum(first + steps, out_height)):
        # Inputs are asked for before they are needed.
        entering = ()
        for i in tl.static_range(STRIDE_H):
            y = row * STRIDE_H - PADDING_H + WINDOW + i
            entering = entering + load_row(
                x, y, height, x_row, inside, X_COLUMN, -PADDING_W, SPAN - PADDING_W
            )
        for i in tl.static_range(RUN):
            pre = shift
            for tap in tl.static_range(TAPS):
                met = window[
                    tap // KERNEL_W * DILATION_H * SPAN + i * STRIDE_W + tap % KERNEL_W * DILATION_W
                ]
                pre = tl.fma(taps[tap], met, pre)
            at, mask = out_at + row * out_row + i * OUT_COLUMN, out_inside[i]
            if ADD:
                pre += activated(tl.load(residual + at, mask, other=0.0), OF_RESIDUAL).to(
                    tl.float32
                )
            if KEEP:
                tl.store(kept + at, pre.to(kept.dtype.element_ty), mask)
            after = act_forward(pre, ACT)
            if MEAN:
                total += tl.where(mask, after, 0.0)
                after = pre
            tl.store(out + at, after.to(out.dtype.element_ty), mask)
        window = window[STRIDE_H * SPAN :] + act_of_row(entering, STRIDE_H * SPAN, BEFORE)
    if MEAN:
        part = (sample * segments + segment) * strips + strip
        tl.store(
            means + part * channels + channel,
            (tl.sum(total, 0) / (out_height * out_width)).to(means.dtype.element_ty),
            has_channel,
        )


@tuned("places", "channels", "run", "num_warps")
def forward_tile(
    dtype: torch.dtype,
    kernel: Sequence[int],
    geometry: ConvGeometry,
    columns: int,
    channels: int,
    last: bool,
) -> DepthwiseTile | None:
    """Return the forward kernel's block sizes; None if the window overfills the registers.

    ``dtype`` is there for the table of measured ones alone.
    """
    height = window_rows(kernel, geometry)

    def state(run: int) -> int:
        """Registers of a thread for the window, its next rows, the weights and the sums."""
        span = (run - 1) * geometry.stride[1] + (kernel[1] - 1) * geometry.dilation[1] + 1
        return (height + geometry.stride[0]) * span + prod(kernel) + 2 * run

    return tile_of(state, columns, channels, last)


def folded_conv(
    x: Loaded, block: Block, residual: Loaded | None, mean: bool
) -> tuple[Tensor, Tensor]:
    """`fastlr.ops.folded.folded_conv` for one channel a group."""
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
    tile = forward_tile(inputs.dtype, kernel, geometry, size[1], channels, last)
    if tile is None:
        return NotImplemented
    segments = triton.cdiv(size[0], ROWS)
    steps = triton.cdiv(size[0], segments)
    tiles = triton.cdiv(channels, tile.channels), triton.cdiv(size[1], tile.columns), segments
    whole = tiles[1] * tile.columns == size[1] and size[1] * geometry.stride[1] == width
    added, of_residual = out, "none"
    if residual is not None:
        added, of_residual = like(residual.tensor, out), residual.activation
    align = alignment(inputs.dtype, True, inputs, out) if last else 1
    parts = tiles[1] * tiles[2] if mean else 0
    # One part is the mean itself.
    dtype = inputs.dtype if parts == 1 else torch.float32
    means = torch.empty(count, parts, channels, dtype=dtype, device=inputs.device)
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
            *inputs.stride()[:3],
            *out.stride()[:3],
            channels,
            height,
            width,
            *size,
            *tiles,
            steps,
            ACT=block.activation,
            KEEP=kept is not out,
            ADD=residual is not None,
            LAST=last,
            ALIGN=align,
            X_COLUMN=inputs.stride(3),
            OUT_COLUMN=out.stride(3),
            **constants(kernel, geometry),
            BEFORE=x.activation,
            OF_RESIDUAL=of_residual,
            MEAN=mean,
            WINDOW=window_rows(kernel, geometry),
            WHOLE=whole,
            RUN=tile.run,
            COLUMNS=tile.columns,
            CHANNELS=tile.channels,
            num_warps=tile.num_warps,
            maxnreg=most_registers(geometry, last),
        )
    if not mean:
        return out, kept
    whole_mean = means[:, 0] if parts == 1 else means.sum(1).to(inputs.dtype)
    return out, whole_mean[:, :, None, None]
