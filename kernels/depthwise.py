"""Depthwise convolutions by channel: weight gradients, their norms, input gradient in one pass.

A program takes one sample, a block of channels and a strip of columns, and walks down the rows of
the output's gradient. In registers it holds a window of input rows, the same window of the input
gradient, and the sums of the k x k taps. At each row it forms g = act'(kept) grad once for each
column of the kernel, adds g x to the taps and w g to the window of the input gradient, stores the
rows that are complete and moves the windows on.

The limit is traffic: x, grad and kept are read once and the input gradient is written once (the k
shifted reads of a row of gradients meet in the cache): with n elements in and m out, 2 n + 2 m
elements; n + 2 m without the input gradient, one m less without an activation. Taps are summed over
a program's threads once, at its end. Where rows or columns are shared between programs their parts
(k k + 1 floats a channel) go through a workspace, in a fixed order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.activation_functions import act_gradient, activated
from fastlr.kernels.launching import covered, launch, multiple, on_device, tuned
from fastlr.kernels.moments import alignment, channels_last, finish_norms, like, moments_space
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.geometry import ConvGeometry
from fastlr.ops.reference.folded import KEEPS_OUTPUT

ENOUGH_PROGRAMS = 2048  # of four warps, to fill a GPU with
STATE = 118  # registers of a thread for taps and windows
# The same for many of them in float16, whose conversions take registers of their own: 5x5, stride
# 2.
STATE_HALF = 88
WARPS = 4


class DepthwiseTile(NamedTuple):
    """Block sizes of one program."""

    columns: int
    channels: int


def window_rows(kernel: Sequence[int], geometry: ConvGeometry) -> int:
    """Input rows that one output row can meet, or the step to the next if that is larger."""
    return max((kernel[0] - 1) * geometry.dilation[0] + 1, geometry.stride[0])


def constants(kernel: Sequence[int], geometry: ConvGeometry) -> dict[str, int]:
    """Kernel and geometry of two axes as constants of a Triton kernel."""
    pairs = zip(("KERNEL", "STRIDE", "PADDING", "DILATION"), (kernel, *geometry[:3]), strict=True)
    return {f"{name}_{axis}": pair[i] for name, pair in pairs for i, axis in enumerate("HW")}


@triton.jit
def added(values, INDEX: tl.constexpr, value):
    """The tuple with ``value`` added to one element."""
    return values[:INDEX] + (values[INDEX] + value,) + values[INDEX + 1 :]


@triton.jit
def zeros(COUNT: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr):
    """A tuple of COUNT tiles of zeros."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (tl.zeros([COLUMNS, CHANNELS], tl.float32),)
    return values


@triton.jit
def load_row(
    base,
    y,
    z,
    channel,
    first_row,
    end_row,
    width,
    row_stride,
    column_stride,
    channel_stride,
    has_channel,
):
    """Load row ``y`` at columns ``z`` of all channels of a tile; zero outside the given bounds.

    The bounds are those of rows and columns.
    """
    mask = ((z >= 0) & (z < width) & (y >= first_row) & (y < end_row))[:, None] & has_channel[
        None, :
    ]
    at = (y * row_stride + z * column_stride)[:, None] + (channel * channel_stride)[None, :]
    return tl.load(base + at, mask, other=0.0)


@triton.jit
def _column_of_taps(
    taps,
    back,
    rows,
    g,
    folded,
    channel,
    has_channel,
    channels,
    WANT_INPUT: tl.constexpr,
    TAP: tl.constexpr,
    INPUT: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STEP: tl.constexpr,
):
    """Add column TAP of the kernel to taps and input gradients, and return both.

    It meets the windows at INPUT, INPUT + STEP, ...
    """
    for r in tl.static_range(KERNEL_H):
        taps = added(taps, r * KERNEL_W + TAP, rows[r * STEP + INPUT] * g)
        if WANT_INPUT:
            w = tl.load(folded + (r * KERNEL_W + TAP) * channels + channel, has_channel, other=0.0)
            back = added(back, r * STEP + INPUT, w.to(tl.float32)[None, :] * g)
    return taps, back


@triton.jit
def _gradient(
    grad,
    kept,
    spread,
    y,
    z,
    channel,
    has_channel,
    height,
    width,
    grad_channel,
    grad_row,
    grad_column,
    kept_channel,
    kept_row,
    kept_column,
    ACT: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Return act'(kept) grad of row ``y`` at columns ``z`` in the inputs' dtype, zero outside.

    MEAN: grad + act'(kept) spread, ``spread`` being a number a channel.
    """
    g = load_row(
        grad, y, z, channel, 0, height, width, grad_row, grad_column, grad_channel, has_channel
    )
    if ACT != "none":
        k = load_row(
            kept, y, z, channel, 0, height, width, kept_row, kept_column, kept_channel, has_channel
        )
        if MEAN:
            inside = ((z >= 0) & (z < width) & (y >= 0) & (y < height))[:, None] & has_channel[
                None, :
            ]
            part = act_gradient(tl.where(inside, spread[None, :], 0.0), k, ACT)
            g = (g.to(tl.float32) + part).to(g.dtype)
        else:
            g = act_gradient(g.to(tl.float32), k, ACT).to(g.dtype)
    return g.to(tl.float32)


@triton.jit(
    do_not_specialize=["height", "width", "out_height", "out_width", "strips", "segments", "steps"]
)
def depthwise_backward_kernel(
    x,
    grad,
    kept,
    folded,
    weight,
    scale,
    more,
    of_mean,
    gx,
    squares,
    inner,
    sums,
    parts,
    x_sample,
    x_channel,
    x_row,
    x_column,
    gx_sample,
    gx_channel,
    gx_row,
    gx_column,
    grad_sample,
    grad_channel,
    grad_row,
    grad_column,
    kept_sample,
    kept_channel,
    kept_row,
    kept_column,
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
    WANT_INPUT: tl.constexpr,
    SPLIT: tl.constexpr,
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
    GRADIENT_AT_OUTPUT: tl.constexpr,
    MORE: tl.constexpr,
    MEAN: tl.constexpr,
    WINDOW: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``steps`` rows of the output for one strip of columns and one block of channels of a sample.

    A place of a strip is STRIDE_W input columns, and the output column that follows when STRIDE_W
    are stepped over. The input row q = p STRIDE - PADDING + r DILATION meets the output row p at
    tap r; columns likewise. A program owns the input rows that are complete, and stored, at its
    steps; gradients of a few rows before are gone through for them.
    """
    if ALIGN > 1:
        if LAST:
            channels, x_row, x_column = (
                multiple(channels, ALIGN),
                multiple(x_row, ALIGN),
                multiple(x_column, ALIGN),
            )
            gx_row, gx_column = multiple(gx_row, ALIGN), multiple(gx_column, ALIGN)
            grad_row, grad_column = multiple(grad_row, ALIGN), multiple(grad_column, ALIGN)
            kept_row, kept_column = multiple(kept_row, ALIGN), multiple(kept_column, ALIGN)
        x_sample, gx_sample = multiple(x_sample, ALIGN), multiple(gx_sample, ALIGN)
        grad_sample, kept_sample = multiple(grad_sample, ALIGN), multiple(kept_sample, ALIGN)
    program = tl.program_id(0)
    channel_tile, rest = program % channel_tiles, program // channel_tiles
    strip, rest = rest % strips, rest // strips
    segment, sample = rest % segments, (rest // segments).to(tl.int64)
    channel = channel_tile * CHANNELS + tl.arange(0, CHANNELS)
    has_channel = channel < channels
    place = strip * COLUMNS + tl.arange(0, COLUMNS)
    x += sample * x_sample
    gx += sample * gx_sample
    more += sample * gx_sample
    grad += sample * grad_sample
    kept += sample * kept_sample

    spread = 0.0
    if MEAN:
        spread = tl.load(of_mean + sample * channels + channel, has_channel, other=0.0).to(
            tl.float32
        )
        spread /= out_height * out_width

    first = segment * steps  # the rows of this program
    top, bottom = (
        first * STRIDE_H - PADDING_H,
        tl.minimum(height, (first + steps) * STRIDE_H - PADDING_H),
    )
    top = tl.maximum(top, 0)
    begin = tl.maximum(first - (WINDOW - 1) // STRIDE_H, 0)
    taps = zeros(KERNEL_H * KERNEL_W, COLUMNS, CHANNELS)
    total = tl.zeros([COLUMNS, CHANNELS], tl.float32)
    back = zeros(WINDOW * STRIDE_W if WANT_INPUT else 0, COLUMNS, CHANNELS)
    rows = ()
    for i in tl.static_range(WINDOW):
        for b in tl.static_range(STRIDE_W):
            value = load_row(
                x,
                begin * STRIDE_H - PADDING_H + i,
                place * STRIDE_W + b,
                channel,
                top,
                bottom,
                width,
                x_row,
                x_column,
                x_channel,
                has_channel,
            )
            rows = rows + (activated(value, BEFORE).to(tl.float32),)
    for p in range(begin, first + steps):
        # Inputs are asked for before they are needed.
        y = p * STRIDE_H - PADDING_H
        following = ()
        for i in tl.static_range(STRIDE_H):
            for b in tl.static_range(STRIDE_W):
                value = load_row(
                    x,
                    y + WINDOW + i,
                    place * STRIDE_W + b,
                    channel,
                    top,
                    bottom,
                    width,
                    x_row,
                    x_column,
                    x_channel,
                    has_channel,
                )
                following = following + (value,)
        g = _gradient(
            grad,
            kept,
            spread,
            p,
            place,
            channel,
            has_channel,
            out_height,
            out_width,
            grad_channel,
            grad_row,
            grad_column,
            kept_channel,
            kept_row,
            kept_column,
            ACT,
            MEAN,
        )
        total += tl.where(p >= first, g, 0.0)
        for s in tl.static_range(KERNEL_W):
            # This tap meets input column b = (s DILATION - PADDING) % STRIDE of each place and, so
            # much away from the place, the gradient.
            away = (
                (s * DILATION_W - PADDING_W) % STRIDE_W + PADDING_W - s * DILATION_W
            ) // STRIDE_W
            g = _gradient(
                grad,
                kept,
                spread,
                p,
                place + away,
                channel,
                has_channel,
                out_height,
                out_width,
                grad_channel,
                grad_row,
                grad_column,
                kept_channel,
                kept_row,
                kept_column,
                ACT,
                MEAN,
            )
            taps, back = _column_of_taps(
                taps,
                back,
                rows,
                g,
                folded,
                channel,
                has_channel,
                channels,
                WANT_INPUT,
                s,
                (s * DILATION_W - PADDING_W) % STRIDE_W,
                KERNEL_H,
                KERNEL_W,
                DILATION_H * STRIDE_W,
            )
        if WANT_INPUT:
            for i in tl.static_range(STRIDE_H):
                for b in tl.static_range(STRIDE_W):
                    z = place * STRIDE_W + b
                    mask = (
                        (z < width)[:, None]
                        & has_channel[None, :]
                        & (y + i >= top)
                        & (y + i < bottom)
                    )
                    at = ((y + i) * gx_row + z * gx_column)[:, None] + (channel * gx_channel)[
                        None, :
                    ]
                    g = back[i * STRIDE_W + b]
                    if MORE:
                        g += tl.load(more + at, mask, other=0.0).to(tl.float32)
                    if (
                        BEFORE != "none" and not GRADIENT_AT_OUTPUT
                    ):  # loaded a few rows ago: from the cache
                        own = x + (
                            ((y + i) * x_row + z * x_column)[:, None]
                            + (channel * x_channel)[None, :]
                        )
                        g = act_gradient(g, tl.load(own, mask, other=0.0), BEFORE)
                    tl.store(gx + at, g.to(gx.dtype.element_ty), mask)
            back = back[STRIDE_H * STRIDE_W :] + zeros(STRIDE_H * STRIDE_W, COLUMNS, CHANNELS)
        rows = rows[STRIDE_H * STRIDE_W :]
        for i in tl.static_range(STRIDE_H * STRIDE_W):
            rows = rows + (activated(following[i], BEFORE).to(tl.float32),)

    part = (sample * segments + segment) * strips + strip
    square = tl.zeros([CHANNELS], tl.float32)
    along = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(KERNEL_H * KERNEL_W):
        value = tl.sum(taps[tap], 0)
        if SPLIT:
            tl.store(
                parts + (part * (KERNEL_H * KERNEL_W) + tap) * channels + channel,
                value,
                has_channel,
            )
        else:
            w = tl.load(weight + channel * (KERNEL_H * KERNEL_W) + tap, has_channel, other=0.0).to(
                tl.float32
            )
            along += w * value
            square += value * value
    tl.store(sums + part * channels + channel, tl.sum(total, 0), has_channel)
    if not SPLIT:
        factor = tl.load(scale + channel, has_channel, other=0.0).to(tl.float32)
        tl.store(inner + sample * channels + channel, along, has_channel)
        tl.store(squares + program, tl.sum(square * factor * factor))


def lanes(dtype: torch.dtype, tiles: int, state: int) -> int:
    """Return the elements of each of ``tiles`` tiles that a thread holds.

    They are as many as one load takes, if the registers allow it.
    """
    widest = 4 if dtype == torch.float32 else 8
    return next((n for n in (8, 4, 2) if n <= widest and n * tiles <= state), 1)


def tile_of(elements: int, places: int, channels: int, last: bool) -> DepthwiseTile:
    """Share ``elements`` between columns and channels: whole memory sectors, then all columns."""
    least = min(16 if last else 1, triton.next_power_of_2(channels), elements)
    columns = min(triton.next_power_of_2(places), elements // least)
    return DepthwiseTile(columns, min(triton.next_power_of_2(channels), elements // columns))


def taps_first(weight: Tensor) -> Tensor:
    """Weights [C, 1, h, w] as [taps, C]: no copy of those that fold_weights gives."""
    return weight.flatten(1).mT.contiguous()


@tuned("columns", "channels")
def backward_tile(
    dtype: torch.dtype,
    kernel: Sequence[int],
    geometry: ConvGeometry,
    places: int,
    channels: int,
    want: bool,
    last: bool,
    bent: bool = False,
) -> DepthwiseTile | None:
    """Return block sizes of the backward kernel; None if windows and taps overfill the registers.

    ``bent``: a smooth activation is applied as ``x`` is loaded, and columns are stepped over or the
    gradient of a mean added.
    """
    tiles = prod(kernel) + window_rows(kernel, geometry) * geometry.stride[1] * (2 if want else 1)
    if tiles > STATE:
        return None
    state = STATE_HALF if dtype == torch.float16 and tiles > 40 else STATE - 44 * bent
    return tile_of(32 * WARPS * lanes(dtype, tiles, state), places, channels, last)


def folded_conv_backward(
    x: Loaded, gradients: Gradients, kept: Tensor, block: Block, want_input: bool
) -> tuple[Tensor | None, ...]:
    """`fastlr.ops.reference.folded.folded_conv_backward` for one channel a group."""
    inputs, grad, geometry = x.tensor, gradients.output, block.geometry
    kept = grad if block.activation == "none" else kept
    if x.gate is not None or not covered(inputs, grad, kept):
        return NotImplemented
    if gradients.mean is not None and block.activation == "none":
        return NotImplemented  # the kernel adds the mean's gradient as it applies the derivative
    gx = torch.empty_like(inputs) if want_input else inputs
    if not covered(gx):
        return NotImplemented
    count, channels, height, width = inputs.shape
    out_height, out_width = grad.shape[2:]
    tensors = (inputs, gx, grad, kept)
    last = all(map(channels_last, tensors))
    kernel = block.weight.shape[2:]
    places = max(triton.cdiv(width, geometry.stride[1]), out_width)
    bent = x.activation not in KEEPS_OUTPUT and (
        gradients.mean is not None or geometry.stride[1] > 1
    )
    tile = backward_tile(inputs.dtype, kernel, geometry, places, channels, want_input, last, bent)
    if tile is None:
        return NotImplemented
    added = gradients.loaded is not None
    more = like(gradients.loaded, gx) if gradients.loaded is not None else inputs
    folded = taps_first(block.folded) if want_input else inputs
    align = alignment(inputs.dtype, last, *tensors) if last else 1
    weight, statistics = block.weight.contiguous(), block.statistics.contiguous()
    channel_tiles, strips = triton.cdiv(channels, tile.channels), triton.cdiv(places, tile.columns)
    steps = max(triton.cdiv(height + geometry.padding[0], geometry.stride[0]), out_height)
    segments = max(1, min(triton.cdiv(ENOUGH_PROGRAMS, count * channel_tiles * strips), steps // 8))
    steps = triton.cdiv(steps, segments)
    moments = moments_space(inputs, segments * strips, prod(kernel), channels, channel_tiles, 1)
    with on_device(inputs):
        launch(
            depthwise_backward_kernel,
            count * segments * strips * channel_tiles,
            inputs,
            grad,
            kept,
            folded,
            weight,
            statistics,
            more,
            gradients.mean,
            gx,
            *moments,
            *itertools.chain(*(t.stride() for t in tensors)),
            channels,
            height,
            width,
            out_height,
            out_width,
            channel_tiles,
            strips,
            segments,
            steps,
            ACT=block.activation,
            WANT_INPUT=want_input,
            SPLIT=segments * strips > 1,
            LAST=last,
            ALIGN=align,
            BEFORE=x.activation,
            GRADIENT_AT_OUTPUT=x.gradient_at_output,
            MORE=added,
            MEAN=gradients.mean is not None,
            **constants(kernel, geometry),
            WINDOW=window_rows(kernel, geometry),
            COLUMNS=tile.columns,
            CHANNELS=tile.channels,
            num_warps=WARPS,
        )
    return gx if want_input else None, *finish_norms(*moments, weight, statistics)


def depthwise_norms(
    x: Tensor,  # [B, C, H, W]
    g: Tensor,  # [B, C, H', W']
    block: Block,
) -> tuple[Tensor, ...]:
    """`fastlr.ops.reference.folded.folded_conv_sq_norms` for one channel a group."""
    block = block._replace(activation="none")
    result = folded_conv_backward(Loaded(x), Gradients(g), g, block, False)
    return result if result is NotImplemented else result[1:]


def depthwise_sq_norms(
    x: Tensor,  # [B, C, H, W]
    g: Tensor,  # [B, C, H', W']
    kernel: Sequence[int],
    geometry: ConvGeometry,
) -> Tensor:
    """Squared norms [B] (float64) of each sample's weight gradient, one channel a group."""
    channels, taps = x.shape[1], prod(kernel)
    ones = torch.ones(3 + channels * max(4, taps), dtype=torch.float32, device=x.device)
    weight = ones[: channels * taps].view(channels, 1, *kernel)
    start = -channels % 4  # the statistics begin at a multiple of 16 bytes then
    numbers = ones[start : start + 4 * channels].view(4, channels)
    result = depthwise_norms(x, g, Block(weight, weight, numbers, "none", geometry))
    return result if result is NotImplemented else result[0]
