"""Depthwise folded convolutions: the forward pass; the backward pass is depthwise.py's.

A program makes ROWS rows of the output for a strip of columns and a block of channels. Each input row is loaded once for
each column of the kernel and added to every output row that it meets, held in registers. Traffic: the input is read once
and the output written once, and where the derivative needs it the activation's input too; the rows and columns that
neighbouring programs share are read again, from the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.activation_functions import act_forward
from fastlr.kernels.depthwise import (
    WARPS,
    Geometry,
    Tile,
    added,
    depthwise_backward,
    lanes,
    load_row,
    packed,
    tile_of,
    variants,
    zeros,
)
from fastlr.kernels.launching import DTYPES, INT32, multiple, on_device
from fastlr.kernels.moments import (
    alignment,
    channels_last,
    covered,
    empty_output,
    like,
)
from fastlr.reference.folded import KEEPS_OUTPUT, output_size

ROWS = 4


@triton.jit
def folded_depthwise_kernel(
    x, weight, bias, residual, out, kept, x_sample, x_channel, x_row, x_column,
    out_sample, out_channel, out_row, out_column,
    channels, height, width, out_height, out_width, channel_tiles, strips, row_tiles,
    ACT: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """ROWS x COLUMNS of the output of one block of channels of one sample; ``weight`` is `packed`."""
    if ALIGN > 1:
        if LAST:
            channels, x_row, x_column = multiple(channels, ALIGN), multiple(x_row, ALIGN), multiple(x_column, ALIGN)
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
    weight += channel_tile * (KERNEL_H * KERNEL_W * CHANNELS)

    sums = zeros(ROWS, COLUMNS, CHANNELS)
    for i in tl.static_range((ROWS - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1):
        for s in tl.static_range(KERNEL_W):
            value = load_row(
                x, first * STRIDE_H - PADDING_H + i, column * STRIDE_W - PADDING_W + s * DILATION_W, channel,
                0, height, width, x_row, x_column, x_channel, has_channel,
            ).to(tl.float32)  # fmt: skip
            for r in tl.static_range(KERNEL_H):
                if i >= r * DILATION_H and (i - r * DILATION_H) % STRIDE_H == 0:
                    if (i - r * DILATION_H) // STRIDE_H < ROWS:
                        w = tl.load(weight + ((r * KERNEL_W + s) * CHANNELS + tl.arange(0, CHANNELS)))
                        sums = added(sums, (i - r * DILATION_H) // STRIDE_H, value * w.to(tl.float32)[None, :])

    shift = tl.load(bias + channel, has_channel, other=0.0).to(tl.float32)[None, :]
    base = sample * out_sample
    for i in tl.static_range(ROWS):
        mask = (column < out_width)[:, None] & has_channel[None, :] & (first + i < out_height)
        at = ((first + i) * out_row + column * out_column)[:, None] + (channel * out_channel)[None, :]
        pre = sums[i] + shift
        if ADD:
            pre += tl.load(residual + base + at, mask, other=0.0).to(tl.float32)
        if KEEP:
            tl.store(kept + base + at, pre.to(kept.dtype.element_ty), mask)
        tl.store(out + base + at, act_forward(pre, ACT).to(out.dtype.element_ty), mask)


def forward_tile(dtype: torch.dtype, where: Geometry, columns: int, channels: int, last: bool) -> Tile:
    """Block sizes of the forward kernel; all taps are held in registers, and the unaligned loads of planes take many."""
    held = lanes(dtype, where.kernel[0] * where.kernel[1] + 2 * ROWS, 140 if last else 70)
    return tile_of(32 * WARPS * held, columns, channels, last)


def folded_conv(
    x: Tensor, weight: Tensor, bias: Tensor, act: str,
    stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int], residual: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`fastlr.reference.folded.folded_conv` for one channel a group; x [B, C, H, W]."""
    count, channels, height, width = x.shape
    where = Geometry((weight.shape[2], weight.shape[3]), stride, padding, dilation)
    size = output_size((height, width), *where)
    small = max(where.kernel) <= 7 and where.window <= 32 and min(size) >= 1
    if not covered(x, weight) or not small or channels * size[0] * size[1] >= INT32:
        return NotImplemented
    out = empty_output(x, channels, size)
    kept = out if act in KEEPS_OUTPUT else torch.empty_like(out)
    residual = None if residual is None else like(residual, out)
    last = channels_last(x)
    tile = forward_tile(x.dtype, where, size[1], channels, last)
    tiles = triton.cdiv(channels, tile.channels), triton.cdiv(size[1], tile.columns), triton.cdiv(size[0], ROWS)
    align = alignment(x.dtype, True, x, out) if last else 1
    with on_device(x):
        folded_depthwise_kernel[(count * tiles[0] * tiles[1] * tiles[2],)](
            x, packed(weight, tile.channels), bias.contiguous(), out if residual is None else residual, out, kept,
            *x.stride(), *out.stride(), channels, height, width, *size, *tiles,
            ACT=act, KEEP=kept is not out, ADD=residual is not None, LAST=last, ALIGN=align, **where.constants(),
            ROWS=ROWS, COLUMNS=tile.columns, CHANNELS=tile.channels, num_warps=WARPS,
        )  # fmt: skip
    return out, kept


def folded_conv_backward(
    x: Tensor, grad: Tensor, kept: Tensor, act: str, folded: Tensor, weight: Tensor, scale: Tensor,
    stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int], want_input: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
    """`fastlr.reference.folded.folded_conv_backward` for one channel a group; x [B, C, H, W]."""
    where = Geometry((weight.shape[2], weight.shape[3]), stride, padding, dilation)
    return depthwise_backward(x, grad, kept, act, folded, weight, scale, where, want_input)


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests."""
    cases = []
    names = {name: dtype for dtype, name in DTYPES.items()}
    for name, dtype, last, align, channels, columns, where in variants():
        tile = forward_tile(names[dtype], where, triton.cdiv(columns, where.stride[1]), channels, last)
        constants = {"ACT": "gelu", "KEEP": True, "ADD": True, "LAST": last, "ALIGN": align, **where.constants()}
        constants |= {"ROWS": ROWS, "COLUMNS": tile.columns, "CHANNELS": tile.channels}
        ones = "channel" if last else "column"
        constants |= {f"x_{ones}": 1, f"out_{ones}": 1}
        types = dict.fromkeys(("x", "weight", "residual", "out", "kept"), f"*{dtype}") | {"bias": "*fp32"}
        arguments = [key for key in folded_depthwise_kernel.arg_names if key not in constants]
        signature = {key: types.get(key, "i32") for key in arguments}
        options = {"num_warps": WARPS, "divisible": "pointers"}
        label = f"forward[{name},{tile.columns}x{tile.channels}]"
        cases.append((label, folded_depthwise_kernel, signature, constants, options))
    return cases
