"""Gradients of a product with one number a sample and channel (squeeze-and-excitation's last step), in one pass.

See fastlr.reference.folded.gate_grad. Traffic: the gradient and x are read once and the input gradient is written once,
3 elements a position; as separate operations it is 6. A program takes one sample and a tile of its channels and walks the
positions; it adds up its part of the gate's gradient in fp32 registers, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import DTYPES, merged, multiple, on_device, workspace
from fastlr.kernels.moments import alignment, channels_last, covered

TILES = {True: (32, 64), False: (128, 16)}  # positions and channels of a tile: channels_last, or planes
WARPS = 4


@triton.jit
def gate_grad_kernel(
    g, x, gate, gx, sums, g_sample, g_channel, g_column, x_sample, x_channel, x_column, gx_sample, gx_channel, gx_column,
    channels, positions, channel_tiles, LAST: tl.constexpr, ALIGN: tl.constexpr, POSITIONS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """One tile of the channels of one sample. LAST: channels are next to each other in memory, else positions."""
    if ALIGN > 1:
        if LAST:
            channels, g_column = multiple(channels, ALIGN), multiple(g_column, ALIGN)
            x_column, gx_column = multiple(x_column, ALIGN), multiple(gx_column, ALIGN)
        else:
            positions, g_channel = multiple(positions, ALIGN), multiple(g_channel, ALIGN)
            x_channel, gx_channel = multiple(x_channel, ALIGN), multiple(gx_channel, ALIGN)
        g_sample, x_sample = multiple(g_sample, ALIGN), multiple(x_sample, ALIGN)
        gx_sample = multiple(gx_sample, ALIGN)
    tile, sample = tl.program_id(0) % channel_tiles, (tl.program_id(0) // channel_tiles).to(tl.int64)
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    has_channel = channel < channels
    g += sample * g_sample
    x += sample * x_sample
    gx += sample * gx_sample
    factor = tl.load(gate + sample * channels + channel, has_channel, other=0.0).to(tl.float32)
    total = tl.zeros([POSITIONS, CHANNELS], tl.float32)
    for start in range(0, positions, POSITIONS):
        t = start + tl.arange(0, POSITIONS)
        mask = (t < positions)[:, None] & has_channel[None, :]
        g_tile = tl.load(g + ((t * g_column)[:, None] + (channel * g_channel)[None, :]), mask, other=0.0).to(tl.float32)
        x_tile = tl.load(x + ((t * x_column)[:, None] + (channel * x_channel)[None, :]), mask, other=0.0).to(tl.float32)
        total += g_tile * x_tile
        out = (g_tile * factor[None, :]).to(gx.dtype.element_ty)
        tl.store(gx + ((t * gx_column)[:, None] + (channel * gx_channel)[None, :]), out, mask)
    tl.store(sums + sample * channels + channel, tl.sum(total, 0), has_channel)


def gate_grad(g: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """See fastlr.reference.folded.gate_grad."""
    if x.ndim != 4 or not covered(g, x) or gate.dtype not in DTYPES:
        return NotImplemented
    gx = torch.empty_like(x)
    columns = [merged((t.shape[2], t.stride(2)), (t.shape[3], t.stride(3))) for t in (g, x, gx)]
    if not covered(gx) or None in columns:
        return NotImplemented
    count, channels, height, width = x.shape
    last = channels_last(x)
    positions_a_tile, channels_a_tile = TILES[last]
    align = alignment(x.dtype, last, g, x, gx)
    sums = workspace(count, channels, device=x.device)
    tiles = triton.cdiv(channels, channels_a_tile)
    strides = [s for t, column in zip((g, x, gx), columns, strict=True) for s in (t.stride(0), t.stride(1), column)]
    with on_device(x):
        gate_grad_kernel[(count * tiles,)](
            g, x, gate.reshape(count, channels).contiguous(), gx, sums, *strides, channels, height * width, tiles,
            LAST=last, ALIGN=align, POSITIONS=positions_a_tile, CHANNELS=channels_a_tile, num_warps=WARPS,
        )  # fmt: skip
    return gx, sums.to(gate.dtype).view(gate.shape)


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests: every dtype and memory format, with wide loads and without."""
    cases = []
    for dtype, name in DTYPES.items():
        for last, (positions, channels) in TILES.items():
            for align in (4 if dtype == torch.float32 else 8, 1):
                blocks = {"LAST": last, "ALIGN": align, "POSITIONS": positions, "CHANNELS": channels}
                ones = ("g_channel", "x_channel", "gx_channel") if last else ("g_column", "x_column", "gx_column")
                constants = blocks | (dict.fromkeys(ones, 1) if align > 1 else {})
                kinds = dict.fromkeys(("g", "x", "gate", "gx"), f"*{name}") | {"sums": "*fp32"}
                signature = {key: kinds.get(key, "i32") for key in gate_grad_kernel.arg_names if key not in constants}
                options = {"num_warps": WARPS, "divisible": "pointers"}
                label = f"gate_grad[{name}{', channels_last' * last}{', odd' * (align == 1)}]"
                cases.append((label, gate_grad_kernel, signature, constants, options))
    return cases
