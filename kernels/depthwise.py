"""Depthwise convolutions by channel: weight gradients, their norms, input gradient in one pass.

A program takes one sample, a block of channels and a strip of columns, and walks down the rows of
the input. A thread has places of RUN adjacent output columns, and the input columns under them. In
registers it holds a window of the gradients g = act'(kept) grad that these inputs meet, each formed
once as it enters from below, and the sums of the k x k taps. At each step it loads the inputs of a
row, adds g x to the taps, and stores the sum of w g, the input gradient, which is complete then.

The limit is traffic: x, grad and kept are read once and the input gradient is written once (what
neighbouring places share of a row of gradients is read again from the cache): with n elements in
and m out, 2 n + 2 m elements; n + 2 m without the input gradient, one m less without an activation.
Taps are summed over a program's threads once, at its end. Where rows or columns are shared between
programs their parts (k k + 1 floats a channel) go through a workspace, in a fixed order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.activation_functions import act_forward, act_gradient
from fastlr.kernels.launching import covered, launch, multiple, on_device, tuned
from fastlr.kernels.moments import alignment, channels_last, finish_norms, like, moments_space
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.geometry import ConvGeometry

ENOUGH_WARPS = 8192  # to fill a GPU with
RUN = 7  # adjacent columns that a thread has at most: sizes of images are often multiples
ENOUGH_RUN = 4  # what is at the ends of runs, and computed twice, is then little enough
# Registers of a thread for what it holds from one row to the next, by the channels that it has.
STATE = {2: 148, 1: 166}
SECTOR = 16  # channels of 16 bits that memory gives at once
WARPS = 4  # of a program at most


class DepthwiseTile(NamedTuple):
    """Block sizes of one program: places of ``run`` output columns each, and channels."""

    places: int
    channels: int
    run: int
    num_warps: int

    @property
    def columns(self) -> int:
        """Output columns."""
        return self.places * self.run


def window_rows(kernel: Sequence[int], geometry: ConvGeometry) -> int:
    """Input rows that one output row can meet, or the step to the next if that is larger."""
    return max((kernel[0] - 1) * geometry.dilation[0] + 1, geometry.stride[0])


def constants(kernel: Sequence[int], geometry: ConvGeometry) -> dict[str, int]:
    """Kernel and geometry of two axes as constants of a Triton kernel."""
    pairs = zip(("KERNEL", "STRIDE", "PADDING", "DILATION"), (kernel, *geometry[:3]), strict=True)
    return {f"{name}_{axis}": pair[i] for name, pair in pairs for i, axis in enumerate("HW")}


def reach(kernel: Sequence[int], geometry: ConvGeometry, axis: int, run: int) -> tuple[int, int]:
    """Outputs, from the first to before the last, that the inputs of a place meet, or are its own.

    A place has ``run`` outputs along the axis, and as many times the stride inputs. At tap t, input
    i of a place meets its output (i + padding - t dilation) / stride, if that is an integer.
    """
    step, padding, dilation = (values[axis] for values in geometry[:3])
    met = set(range(run))
    for i in range(run * step):
        for t in range(kernel[axis]):
            if (i + padding - t * dilation) % step == 0:
                met.add((i + padding - t * dilation) // step)
    return min(met), max(met) + 1


def reaches(kernel: Sequence[int], geometry: ConvGeometry, run: int) -> dict[str, int]:
    """The `reach` of a row and of a run of columns as constants of the kernel."""
    found = {"RUN": run}
    found["LOW_H"], found["HIGH_H"] = reach(kernel, geometry, 0, 1)
    found["LOW_W"], found["HIGH_W"] = reach(kernel, geometry, 1, run)
    return found


@triton.jit
def zeros(COUNT: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr):
    """A tuple of COUNT tiles of zeros."""
    values = ()
    for _ in tl.static_range(COUNT):
        values = values + (tl.zeros([COLUMNS, CHANNELS], tl.float32),)
    return values


@triton.jit
def load_taps(weight, channel, has_channel, channels, TAPS: tl.constexpr, PLACES: tl.constexpr):
    """The weights of each tap, [taps, C] in memory, for all places."""
    taps = ()
    for tap in tl.static_range(TAPS):
        w = tl.load(weight + tap * channels + channel, has_channel, other=0.0).to(tl.float32)
        taps = taps + (tl.broadcast_to(w[None, :], PLACES, channel.shape[0]),)
    return taps


@triton.jit
def columns_inside(
    place,
    width,
    has_channel,
    OWN: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Masks of columns LOW to before HIGH of each place, and of all channels of a tile.

    WHOLE: there is nothing beyond the OWN columns of the last place, and all of them are there.
    """
    inside = ()
    for column in tl.static_range(LOW, HIGH):
        if WHOLE and column >= 0 and column < OWN:
            mask = tl.broadcast_to(has_channel[None, :], place.shape[0], has_channel.shape[0])
        else:
            z = place + column
            mask = ((z >= 0) & (z < width))[:, None] & has_channel[None, :]
        inside = inside + (mask,)
    return inside


@triton.jit
def load_row(
    places,
    y,
    height,
    row_stride,
    inside,
    COLUMN: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Load columns LOW to before HIGH, COLUMN elements apart, of each place in row ``y``.

    They are zero where there is nothing. ``places`` are their pointers in the first row, ``inside``
    the masks of the columns (`columns_inside`).
    """
    exists = (y >= 0) & (y < height)
    row = places + y * row_stride
    values = ()
    for i in tl.static_range(HIGH - LOW):
        value = tl.load(row + (LOW + i) * COLUMN, inside[i] & exists, other=0.0)
        values = values + (value,)
    return values


@triton.jit
def act_of_row(values, COUNT: tl.constexpr, ACT: tl.constexpr):
    """The activation of loaded tiles in fp32. Zero, as beyond the edge, stays zero."""
    after = ()
    for i in tl.static_range(COUNT):
        after = after + (act_forward(values[i].to(tl.float32), ACT),)
    return after


@triton.jit
def _gradients(
    grad,
    kept,
    spread,
    y,
    height,
    inside,
    ACT: tl.constexpr,
    MEAN: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Return act'(kept) grad of a loaded row ``y`` in fp32.

    MEAN: grad + act'(kept) spread, ``spread`` being a number a channel.
    """
    exists = (y >= 0) & (y < height)
    gradients = ()
    for i in tl.static_range(COUNT):
        g = grad[i].to(tl.float32)
        if MEAN:
            g += act_gradient(tl.where(inside[i] & exists, spread[None, :], 0.0), kept[i], ACT)
        else:
            g = act_gradient(g, kept[i], ACT)
        gradients = gradients + (g,)
    return gradients


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
    gx_sample,
    gx_channel,
    gx_row,
    grad_sample,
    grad_channel,
    grad_row,
    kept_sample,
    kept_channel,
    kept_row,
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
    X_COLUMN: tl.constexpr,
    GX_COLUMN: tl.constexpr,
    GRAD_COLUMN: tl.constexpr,
    KEPT_COLUMN: tl.constexpr,
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
    LOW_H: tl.constexpr,
    HIGH_H: tl.constexpr,
    LOW_W: tl.constexpr,
    HIGH_W: tl.constexpr,
    WHOLE: tl.constexpr,
    RUN: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``steps`` rows of places for one strip of columns and one block of channels of a sample.

    A place is an output row and RUN output columns, the STRIDE_H input rows and RUN STRIDE_W input
    columns of the same numbers. Its inputs meet outputs from LOW to before HIGH of its own
    (`reach`).
    """
    if ALIGN > 1:
        if LAST:
            channels = multiple(channels, ALIGN)
            x_row, gx_row = multiple(x_row, ALIGN), multiple(gx_row, ALIGN)
            grad_row, kept_row = multiple(grad_row, ALIGN), multiple(kept_row, ALIGN)
        x_sample, gx_sample = multiple(x_sample, ALIGN), multiple(gx_sample, ALIGN)
        grad_sample, kept_sample = multiple(grad_sample, ALIGN), multiple(kept_sample, ALIGN)
    PLACES: tl.constexpr = COLUMNS // RUN
    WIDE: tl.constexpr = RUN * STRIDE_W  # input columns of a place
    SPAN: tl.constexpr = HIGH_W - LOW_W  # output columns that they meet
    TAPS: tl.constexpr = KERNEL_H * KERNEL_W
    program = tl.program_id(0)
    channel_tile, rest = program % channel_tiles, program // channel_tiles
    strip, rest = rest % strips, rest // strips
    segment, sample = rest % segments, (rest // segments).to(tl.int64)
    channel = channel_tile * CHANNELS + tl.arange(0, CHANNELS)
    has_channel = channel < channels
    place = strip * COLUMNS + tl.arange(0, PLACES) * RUN  # its first output column
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
    weights = ()
    if WANT_INPUT:
        weights = load_taps(folded, channel, has_channel, channels, TAPS, PLACES)
    inside = columns_inside(place * STRIDE_W, width, has_channel, WIDE, 0, WIDE, WHOLE)
    out_inside = columns_inside(place, out_width, has_channel, RUN, LOW_W, HIGH_W, WHOLE)
    x += (place * STRIDE_W * X_COLUMN)[:, None] + (channel * x_channel)[None, :]
    gx_at = (place * STRIDE_W * GX_COLUMN)[:, None] + (channel * gx_channel)[None, :]
    grad += (place * GRAD_COLUMN)[:, None] + (channel * grad_channel)[None, :]
    kept += (place * KEPT_COLUMN)[:, None] + (channel * kept_channel)[None, :]

    first = segment * steps
    taps = zeros(TAPS, PLACES, CHANNELS)
    total = tl.zeros([PLACES, CHANNELS], tl.float32)
    window = zeros((HIGH_H - LOW_H) * SPAN, PLACES, CHANNELS)
    for y in range(first + LOW_H, first + HIGH_H):
        g = load_row(grad, y, out_height, grad_row, out_inside, GRAD_COLUMN, LOW_W, HIGH_W)
        k = g
        if ACT != "none":
            k = load_row(kept, y, out_height, kept_row, out_inside, KEPT_COLUMN, LOW_W, HIGH_W)
        window = window[SPAN:] + _gradients(
            g, k, spread, y, out_height, out_inside, ACT, MEAN, SPAN
        )
    for p in range(first, first + steps):
        # All is asked for before it is needed, and before anything is stored.
        y = p + HIGH_H
        g = load_row(grad, y, out_height, grad_row, out_inside, GRAD_COLUMN, LOW_W, HIGH_W)
        k = g
        if ACT != "none":
            k = load_row(kept, y, out_height, kept_row, out_inside, KEPT_COLUMN, LOW_W, HIGH_W)
        inputs, others = (), ()
        for i in tl.static_range(STRIDE_H):
            q = p * STRIDE_H + i
            inputs = inputs + load_row(x, q, height, x_row, inside, X_COLUMN, 0, WIDE)
            if MORE:
                others = others + load_row(
                    more + gx_at, q, height, gx_row, inside, GX_COLUMN, 0, WIDE
                )
        for column in tl.static_range(RUN):
            total += window[-LOW_H * SPAN + column - LOW_W]
        for i in tl.static_range(STRIDE_H * WIDE):
            value = act_forward(inputs[i].to(tl.float32), BEFORE)
            back = tl.zeros([PLACES, CHANNELS], tl.float32)
            moments = ()
            for tap in tl.static_range(TAPS):
                moment = taps[tap]
                # Input row i // WIDE, column i % WIDE of the place; tap likewise (see `reach`).
                if (i // WIDE + PADDING_H - tap // KERNEL_W * DILATION_H) % STRIDE_H == 0:
                    if (i % WIDE + PADDING_W - tap % KERNEL_W * DILATION_W) % STRIDE_W == 0:
                        met = window[
                            (
                                (i // WIDE + PADDING_H - tap // KERNEL_W * DILATION_H) // STRIDE_H
                                - LOW_H
                            )
                            * SPAN
                            + (i % WIDE + PADDING_W - tap % KERNEL_W * DILATION_W) // STRIDE_W
                            - LOW_W
                        ]
                        moment = tl.fma(value, met, moment)
                        if WANT_INPUT:
                            back = tl.fma(weights[tap], met, back)
                moments = moments + (moment,)
            taps = moments
            if WANT_INPUT:
                if MORE:
                    back += others[i].to(tl.float32)
                if not GRADIENT_AT_OUTPUT:
                    back = act_gradient(back, inputs[i], BEFORE)
                q = p * STRIDE_H + i // WIDE
                at = gx_at + q * gx_row + i % WIDE * GX_COLUMN
                tl.store(gx + at, back.to(gx.dtype.element_ty), inside[i % WIDE] & (q < height))
        window = window[SPAN:] + _gradients(
            g, k, spread, y, out_height, out_inside, ACT, MEAN, SPAN
        )

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


def tile_of(
    state: Callable[[int], int], columns: int, channels: int, last: bool
) -> DepthwiseTile | None:
    """Return block sizes; None where not even a run of one column fits the registers.

    A thread has two adjacent channels if the registers allow it for a run that is long enough to
    share its gradients or inputs, else one; and the longest run that fits. Where columns are
    adjacent in memory there are no runs, so that neighbouring threads load neighbouring columns.

    Args:
        state: registers of one channel of a run of so many columns.
        columns: of the output.
        channels: of it.
        last: they are adjacent in memory.
    """
    runs = range(min(RUN, columns) if last else 1, 0, -1)
    enough = min(ENOUGH_RUN, runs[0])
    for lanes, most in STATE.items():
        run = next((run for run in runs if lanes * state(run) <= most), 0)
        if run >= enough or (lanes == 1 and run > 0):
            return _shared(lanes, run, columns, channels, last)
    return None


def _shared(lanes: int, run: int, columns: int, channels: int, last: bool) -> DepthwiseTile:
    """Share a program's threads, of so many channels and columns each, between both axes.

    Where channels are adjacent, a warp at least, and whole memory sectors; all columns if it can.
    """
    places = triton.next_power_of_2(triton.cdiv(columns, run))
    run = triton.cdiv(columns, places)  # the same places with as few columns as do
    widest = triton.next_power_of_2(channels)
    if last:
        across = min(widest, max(SECTOR, 32 * lanes // places))
        places = min(places, 32 * WARPS * lanes // across)
        return DepthwiseTile(places, across, run, max(1, places * across // (32 * lanes)))
    places = min(places, 32 * WARPS)
    return DepthwiseTile(places, min(widest, 32 * WARPS * lanes // places), run, WARPS)


def most_registers(geometry: ConvGeometry, last: bool) -> int | None:
    """Return the registers a thread where ptxas alone would spill, or None.

    It would spill for occupancy's sake, where columns are stepped over or adjacent in memory.
    """
    return 255 if geometry.stride[1] > 1 or not last else None


def taps_first(weight: Tensor) -> Tensor:
    """Weights [C, 1, h, w] as [taps, C]: no copy of those that fold_weights gives."""
    return weight.flatten(1).mT.contiguous()


@tuned("places", "channels", "run", "num_warps")
def backward_tile(
    dtype: torch.dtype,
    kernel: Sequence[int],
    geometry: ConvGeometry,
    columns: int,
    channels: int,
    want: bool,
    last: bool,
) -> DepthwiseTile | None:
    """Return block sizes of the backward kernel; None if what is held overfills the registers.

    ``dtype`` is there for the table of measured ones alone.
    """
    low, high = reach(kernel, geometry, 0, 1)

    def state(run: int) -> int:
        """Registers for window, next row, taps, weights, inputs and what is added to gradients."""
        left, right = reach(kernel, geometry, 1, run)
        window = (high - low + 1) * (right - left)
        inputs = 2 * run * prod(geometry.stride)
        return window + prod(kernel) * (2 if want else 1) + inputs

    return tile_of(state, columns, channels, last)


def folded_conv_backward(
    x: Loaded, gradients: Gradients, kept: Tensor, block: Block, want_input: bool
) -> tuple[Tensor | None, ...]:
    """`fastlr.ops.folded.folded_conv_backward` for one channel a group."""
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
    columns = max(triton.cdiv(width, geometry.stride[1]), out_width)
    tile = backward_tile(inputs.dtype, kernel, geometry, columns, channels, want_input, last)
    if tile is None:
        return NotImplemented
    added = gradients.loaded is not None
    more = like(gradients.loaded, gx) if gradients.loaded is not None else inputs
    folded = taps_first(block.folded) if want_input else inputs
    align = alignment(inputs.dtype, last, *tensors) if last else 1
    weight, statistics = block.weight.contiguous(), block.statistics.contiguous()
    channel_tiles, strips = triton.cdiv(channels, tile.channels), triton.cdiv(columns, tile.columns)
    steps = max(triton.cdiv(height, geometry.stride[0]), out_height)
    whole = strips * tile.columns == out_width and out_width * geometry.stride[1] == width
    warps = count * channel_tiles * strips * tile.num_warps
    segments = max(1, min(triton.cdiv(ENOUGH_WARPS, warps), steps // 8))
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
            *itertools.chain(*(t.stride()[:3] for t in tensors)),
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
            X_COLUMN=inputs.stride(3),
            GX_COLUMN=gx.stride(3),
            GRAD_COLUMN=grad.stride(3),
            KEPT_COLUMN=kept.stride(3),
            BEFORE=x.activation,
            GRADIENT_AT_OUTPUT=x.gradient_at_output,
            MORE=added,
            MEAN=gradients.mean is not None,
            **constants(kernel, geometry),
            **reaches(kernel, geometry, tile.run),
            WHOLE=whole,
            COLUMNS=tile.columns,
            CHANNELS=tile.channels,
            num_warps=tile.num_warps,
            maxnreg=most_registers(geometry, last),
        )
    return gx if want_input else None, *finish_norms(*moments, weight, statistics)


def depthwise_norms(
    x: Tensor,  # [B, C, H, W]
    g: Tensor,  # [B, C, H', W']
    block: Block,
) -> tuple[Tensor, ...]:
    """`fastlr.ops.folded.folded_conv_sq_norms` for one channel a group."""
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
