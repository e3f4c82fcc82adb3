"""Pointwise (1x1) folded convolutions: forward with bias and activation, backward in one pass.

Forward: a program makes one tile of positions x outputs. Traffic: x is read once and the output
written once, and where the derivative needs it the activation's input too; outputs wider than a
tile read x again, from L2.

Backward: a program takes one sample (or a part of its positions) and walks its positions tile by
tile: it loads the gradient, what was kept and x, forms g = act'(kept) grad in registers, adds g^T x
to M and writes g W, the tile of the input gradient. M is squared at the end and never written,
unless the sample was split. Traffic: 2 I + 2 O elements a position (I + 2 O without the input
gradient; one O less without activation), the least possible. Inputs that do not fit one tile are
done by several programs, each with all outputs: gradients are then read again, from L2. With few
positions, and more weights than a program holds, it walks the outputs instead: x and its gradient
stay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.activation_functions import act_forward, act_gradient, activated
from fastlr.kernels.launching import (
    INT32,
    architecture,
    covered,
    launch,
    merged,
    multiple,
    on_device,
    tuned,
)
from fastlr.kernels.moments import (
    alignment,
    channels_last,
    empty_output,
    finish_norms,
    like,
    moments_space,
)
from fastlr.ops.activations import KEEPS_OUTPUT
from fastlr.ops.block import Block, Gradients, Loaded
from fastlr.ops.folded import activation_grad

ENOUGH_PROGRAMS = 512  # to fill a GPU with
FEW = 256  # positions that may be one tile
CHEAP = ("none", "relu", "relu6", "hardswish")  # activations whose derivative takes few registers


class PointwiseTile(NamedTuple):
    """Block sizes of one program, and how it is compiled."""

    positions: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["out_width", "position_tiles", "output_tiles"])
def folded_pointwise_kernel(
    x,
    weight,
    bias,
    residual,
    gate,
    out,
    kept,
    x_sample,
    x_channel,
    x_row,
    x_column,
    out_sample,
    out_channel,
    out_position,
    positions,
    out_width,
    inputs,
    outputs,
    position_tiles,
    output_tiles,
    stride_h,
    stride_w,
    ACT: tl.constexpr,
    KEEP: tl.constexpr,
    ADD: tl.constexpr,
    PLAIN: tl.constexpr,
    LAST: tl.constexpr,
    BEFORE: tl.constexpr,
    GATE: tl.constexpr,
    OF_RESIDUAL: tl.constexpr,
    ALIGN: tl.constexpr,
    POSITIONS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Make one tile of positions x outputs.

    PLAIN: the inputs of position t are t columns further. LAST: channels_last.

    ``residual``, ``out`` and ``kept`` have the same strides.
    """
    if ALIGN > 1:
        if LAST:
            inputs, outputs = multiple(inputs, ALIGN), multiple(outputs, ALIGN)
            out_position = multiple(out_position, ALIGN)
            x_row, x_column = multiple(x_row, ALIGN), multiple(x_column, ALIGN)
        else:
            positions, x_channel, out_channel = (
                multiple(positions, ALIGN),
                multiple(x_channel, ALIGN),
                multiple(out_channel, ALIGN),
            )
        x_sample, out_sample = multiple(x_sample, ALIGN), multiple(out_sample, ALIGN)
    tile = tl.program_id(0)
    output_tile, rest = tile % output_tiles, tile // output_tiles
    start, sample = rest % position_tiles * POSITIONS, (rest // position_tiles).to(tl.int64)
    t = start + tl.arange(0, POSITIONS)
    exists = t < positions
    output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = output < outputs
    x += sample * x_sample
    if PLAIN:
        x += start.to(tl.int64) * x_column
        x_at = tl.arange(0, POSITIONS) * x_column
    else:
        x_at = t // out_width * stride_h * x_row + t % out_width * stride_w * x_column

    product = tl.zeros([POSITIONS, OUTPUTS], tl.float32)
    for first in range(0, inputs, INPUTS):
        channel = first + tl.arange(0, INPUTS)
        has_channel = channel < inputs
        x_tile = tl.load(
            x + (x_at[:, None] + (channel * x_channel)[None, :]),
            exists[:, None] & has_channel[None, :],
            other=0.0,
        )
        x_tile = activated(x_tile, BEFORE)
        if GATE:
            factor = tl.load(gate + sample * inputs + channel, has_channel, other=0.0).to(
                tl.float32
            )
            x_tile = (x_tile.to(tl.float32) * factor[None, :]).to(x_tile.dtype)
        w_tile = tl.load(
            weight + (output[None, :] * inputs + channel[:, None]),
            has_channel[:, None] & has_output[None, :],
            other=0.0,
        )
        product = tl.dot(x_tile, w_tile, product, input_precision="ieee")
    product += tl.load(bias + output, has_output, other=0.0).to(tl.float32)[None, :]

    base = sample * out_sample + start.to(tl.int64) * out_position
    at = (tl.arange(0, POSITIONS) * out_position)[:, None] + (output * out_channel)[None, :]
    mask = exists[:, None] & has_output[None, :]
    if ADD:
        product += activated(tl.load(residual + base + at, mask, other=0.0), OF_RESIDUAL).to(
            tl.float32
        )
    if KEEP:
        tl.store(kept + base + at, product.to(kept.dtype.element_ty), mask)
    tl.store(out + base + at, act_forward(product, ACT).to(out.dtype.element_ty), mask)


@triton.jit
def _places(t, row, column, width, stride_h, stride_w, PLAIN: tl.constexpr):
    """Offsets of the inputs that positions ``t`` of the output take."""
    if PLAIN:
        return t * column
    else:
        return t // width * stride_h * row + t % width * stride_w * column


@triton.jit
def _load_tile(
    base,
    strides,
    start,
    end,
    channel,
    has_channel,
    width,
    step_h,
    step_w,
    PLAIN: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Load a tile of positions x channels, zero from position ``end`` on.

    ``strides`` are those of channels, rows and columns.
    """
    t = start + tl.arange(0, POSITIONS)
    at = _places(t, strides[1], strides[2], width, step_h, step_w, PLAIN)
    mask = (t < end)[:, None] & has_channel[None, :]
    return tl.load(base + (at[:, None] + (channel * strides[0])[None, :]), mask, other=0.0)


@triton.jit
def _leave(
    gx,
    more,
    g,
    x_tile,
    factor,
    at,
    mask,
    BEFORE: tl.constexpr,
    GRADIENT_AT_OUTPUT: tl.constexpr,
    GATE: tl.constexpr,
    MORE: tl.constexpr,
):
    """Store the input gradient of a tile, from that of what entered the product."""
    if GATE:
        g *= factor[None, :]
    if MORE:
        g += tl.load(more + at, mask, other=0.0).to(tl.float32)
    if not GRADIENT_AT_OUTPUT:
        g = act_gradient(g, x_tile, BEFORE)
    tl.store(gx + at, g.to(gx.dtype.element_ty), mask)


@triton.jit
def folded_pointwise_backward_kernel(
    x,
    grad,
    kept,
    folded,
    weight,
    scale,
    gate,
    more,
    gx,
    of_gate,
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
    positions,
    out_width,
    inputs,
    outputs,
    input_tiles,
    splits,
    stride_h,
    stride_w,
    steps,
    ACT: tl.constexpr,
    WANT_INPUT: tl.constexpr,
    SPLIT: tl.constexpr,
    FEW: tl.constexpr,
    PLAIN: tl.constexpr,
    X_LAST: tl.constexpr,
    G_LAST: tl.constexpr,
    BEFORE: tl.constexpr,
    GRADIENT_AT_OUTPUT: tl.constexpr,
    GATE: tl.constexpr,
    MORE: tl.constexpr,
    ALIGN: tl.constexpr,
    POSITIONS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Go through all positions of a sample for all outputs and one tile of the inputs.

    SPLIT: ``steps`` tiles of the positions only.

    FEW: all positions are one tile, and the outputs several; else the other way about. PLAIN:
    position t is t columns further in every tensor. X_LAST: x and gx are channels_last; G_LAST:
    grad and kept. M is first of ``before(x)`` without the gate: with the folded weight it gives the
    gate's gradient too.
    """
    if ALIGN > 1:
        if X_LAST:
            inputs, x_row, x_column = (
                multiple(inputs, ALIGN),
                multiple(x_row, ALIGN),
                multiple(x_column, ALIGN),
            )
            gx_row, gx_column = multiple(gx_row, ALIGN), multiple(gx_column, ALIGN)
        else:
            x_channel, gx_channel = multiple(x_channel, ALIGN), multiple(gx_channel, ALIGN)
            if PLAIN:  # elsewhere the input has other positions than the output
                positions = multiple(positions, ALIGN)
        if G_LAST:
            outputs, grad_row, grad_column = (
                multiple(outputs, ALIGN),
                multiple(grad_row, ALIGN),
                multiple(grad_column, ALIGN),
            )
            kept_row, kept_column = multiple(kept_row, ALIGN), multiple(kept_column, ALIGN)
        else:
            positions, grad_channel, kept_channel = (
                multiple(positions, ALIGN),
                multiple(grad_channel, ALIGN),
                multiple(kept_channel, ALIGN),
            )
        x_sample, gx_sample = multiple(x_sample, ALIGN), multiple(gx_sample, ALIGN)
        grad_sample, kept_sample = multiple(grad_sample, ALIGN), multiple(kept_sample, ALIGN)
    program = tl.program_id(0)
    input_tile, rest = program % input_tiles, program // input_tiles
    split, sample = rest % splits, (rest // splits).to(tl.int64)
    channel = input_tile * INPUTS + tl.arange(0, INPUTS)
    has_channel = channel < inputs
    output = tl.arange(0, OUTPUTS)
    has_output = output < outputs
    both = has_output[:, None] & has_channel[None, :]
    weights_at = output[:, None] * inputs + channel[None, :]
    x += sample * x_sample
    gx += sample * gx_sample
    more += sample * gx_sample
    grad += sample * grad_sample
    kept += sample * kept_sample
    x_at, grad_at = (x_channel, x_row, x_column), (grad_channel, grad_row, grad_column)
    kept_at, factor = (kept_channel, kept_row, kept_column), 0.0
    if GATE:
        factor = tl.load(gate + sample * inputs + channel, has_channel, other=0.0).to(tl.float32)
    if FEW:
        entered = _load_tile(
            x, x_at, 0, positions, channel, has_channel, out_width, 1, 1, PLAIN, POSITIONS
        )
        entered = activated(entered, BEFORE)
        if GATE:
            entered = (entered.to(tl.float32) * factor[None, :]).to(entered.dtype)
        square = tl.zeros([OUTPUTS], tl.float32)
        back = tl.zeros([POSITIONS, INPUTS], tl.float32)
        for first in range(0, outputs, OUTPUTS):
            output = first + tl.arange(0, OUTPUTS)
            has_output = output < outputs
            both = has_output[:, None] & has_channel[None, :]
            weights_at = output[:, None] * inputs + channel[None, :]
            g = _load_tile(
                grad, grad_at, 0, positions, output, has_output, out_width, 1, 1, PLAIN, POSITIONS
            )
            if ACT != "none":
                own = _load_tile(
                    kept,
                    kept_at,
                    0,
                    positions,
                    output,
                    has_output,
                    out_width,
                    1,
                    1,
                    PLAIN,
                    POSITIONS,
                )
                g = act_gradient(g.to(tl.float32), own, ACT).to(g.dtype)
            product = tl.dot(tl.trans(g), entered, input_precision="ieee")
            if WANT_INPUT:
                forward = tl.load(folded + weights_at, both, other=0.0)
                back = tl.dot(g, forward, back, input_precision="ieee")
            w = tl.load(weight + weights_at, both, other=0.0).to(tl.float32)
            at = (sample * input_tiles + input_tile) * outputs + output
            tl.store(inner + at, tl.sum(w * product, 1), has_output)
            if input_tile == 0:
                tl.store(sums + sample * outputs + output, tl.sum(g.to(tl.float32), 0), has_output)
            of_output = tl.load(scale + output, has_output, other=0.0).to(tl.float32)
            square += of_output * of_output * tl.sum(product * product, 1)
        tl.store(squares + program, tl.sum(square))
        if WANT_INPUT:
            t = tl.arange(0, POSITIONS)
            at = (t * gx_column)[:, None] + (channel * gx_channel)[None, :]
            mask = (t < positions)[:, None] & has_channel[None, :]
            # x is loaded again, from the cache: it would take many registers
            x_tile = _load_tile(
                x, x_at, 0, positions, channel, has_channel, out_width, 1, 1, PLAIN, POSITIONS
            )
            if GATE:
                of_factor = tl.sum(activated(x_tile, BEFORE).to(tl.float32) * back, 0)
                place = of_gate + sample * inputs + channel
                tl.store(place, of_factor.to(of_gate.dtype.element_ty), has_channel)
            _leave(gx, more, back, x_tile, factor, at, mask, BEFORE, GRADIENT_AT_OUTPUT, GATE, MORE)
    else:
        if WANT_INPUT:
            forward = tl.load(folded + weights_at, both, other=0.0)
        product = tl.zeros([OUTPUTS, INPUTS], tl.float32)
        total = tl.zeros([OUTPUTS, 16], tl.float32)
        ones = tl.full([POSITIONS, 16], 1.0, x.dtype.element_ty)
        begin, end = 0, positions
        if SPLIT:
            begin = split * steps * POSITIONS
            end = tl.minimum(positions, begin + steps * POSITIONS)
        g_next = _load_tile(
            grad, grad_at, begin, end, output, has_output, out_width, 1, 1, PLAIN, POSITIONS
        )
        if ACT != "none":
            kept_next = _load_tile(
                kept, kept_at, begin, end, output, has_output, out_width, 1, 1, PLAIN, POSITIONS
            )
        x_next = _load_tile(
            x,
            x_at,
            begin,
            end,
            channel,
            has_channel,
            out_width,
            stride_h,
            stride_w,
            PLAIN,
            POSITIONS,
        )
        for start in tl.range(begin, end, POSITIONS):
            # Gradients are loaded a tile ahead: Triton would not do that by itself for what is
            # changed before a product, and would form g anew for each of the products.
            g = g_next
            after = start + POSITIONS
            g_next = _load_tile(
                grad, grad_at, after, end, output, has_output, out_width, 1, 1, PLAIN, POSITIONS
            )
            if ACT != "none":
                g = act_gradient(g.to(tl.float32), kept_next, ACT).to(g.dtype)
                kept_next = _load_tile(
                    kept, kept_at, after, end, output, has_output, out_width, 1, 1, PLAIN, POSITIONS
                )
            x_tile = x_next
            x_next = _load_tile(
                x,
                x_at,
                after,
                end,
                channel,
                has_channel,
                out_width,
                stride_h,
                stride_w,
                PLAIN,
                POSITIONS,
            )
            across = tl.trans(g)
            product = tl.dot(across, activated(x_tile, BEFORE), product, input_precision="ieee")
            # The sum over positions, without a reduction.
            total = tl.dot(across, ones, total, input_precision="ieee")
            if WANT_INPUT:
                g_in = tl.dot(g, forward, input_precision="ieee")
                t = start + tl.arange(0, POSITIONS)
                gx_at = _places(t, gx_row, gx_column, out_width, stride_h, stride_w, PLAIN)
                mask = (t < end)[:, None] & has_channel[None, :]
                at = gx_at[:, None] + (channel * gx_channel)[None, :]
                _leave(
                    gx, more, g_in, x_tile, factor, at, mask, BEFORE, GRADIENT_AT_OUTPUT, GATE, MORE
                )

        if GATE:
            at = of_gate + sample * inputs + channel
            tl.store(
                at,
                tl.sum(forward.to(tl.float32) * product, 0).to(of_gate.dtype.element_ty),
                has_channel,
            )
            product *= factor[None, :]
        total_g = tl.max(total, 1)  # its columns are equal
        if SPLIT:
            at = sample * splits + split
            tl.store(
                parts + at * inputs * outputs + (channel[None, :] * outputs + output[:, None]),
                product,
                both,
            )
            if input_tile == 0:
                tl.store(sums + at * outputs + output, total_g, has_output)
        else:
            w = tl.load(weight + weights_at, both, other=0.0).to(tl.float32)
            tl.store(
                inner + (sample * input_tiles + input_tile) * outputs + output,
                tl.sum(w * product, 1),
                has_output,
            )
            if input_tile == 0:
                tl.store(sums + sample * outputs + output, total_g, has_output)
            s = tl.load(scale + output, has_output, other=0.0).to(tl.float32)
            product *= s[:, None]
            tl.store(squares + program, tl.sum(product * product))


def block_size(n: int) -> int:
    """The size of a block that holds ``n``: a power of two, 16 at least, as products need."""
    return max(16, triton.next_power_of_2(n))


@tuned("positions", "outputs", "inputs", "num_warps", "num_stages")
def forward_tile(
    dtype: torch.dtype, outputs: int, inputs: int, align: int, *, changed: bool = False
) -> PointwiseTile:
    """Block sizes of the forward kernel; ``changed``: the inputs are before they are multiplied."""
    if dtype == torch.float32 or align == 1:
        stages = 1 if align == 1 else 2
        return PointwiseTile(32, min(64, block_size(outputs)), 16, 4, stages)
    across = min(128, block_size(outputs))
    along = min(32 if changed else 64, block_size(inputs))
    warps = 8 if across == 128 else 4
    return PointwiseTile(128, across, along, warps, 3)


@tuned("positions", "inputs", "num_warps")
def backward_tile(
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    act: str,
    last: bool,
    align: int,
    more: bool = False,
    gated: bool = False,
) -> PointwiseTile | None:
    """Return block sizes of the backward kernel; None where it would spill or has too many inputs.

    Plain torch serves there.

    ``last``: everything is channels_last. ``more``: the input is changed as it is loaded, or its
    gradient added to another. ``gated``: it is multiplied by factors. A stage only: Triton's own
    pipeline fails on three products in one loop for compute capability 10.0 (3.6).
    """
    if dtype == torch.float32 or align == 1:
        return _narrow_backward_tile(dtype, outputs, inputs, last, align, more)
    across, cheap = block_size(outputs), act in CHEAP
    if last:
        widest = 256
    else:
        widest = 128 if cheap else 64
    if across > widest:
        return None
    along = max(block_size(inputs), 32 if across == 256 else 16)
    along = min(128, (8192 if last else 4096) // across, along)
    if (gated and not cheap) or (more and across == 64):
        along = min(along, 64)
    if gated and across == 256:
        along = 16
    if inputs > 4 * along:
        return None
    small = across <= 64 and along <= 32 and across * along >= 512
    if cheap and small and (last or not gated):
        return PointwiseTile(64, across, along, 8 if act == "hardswish" else 4, 1)
    light = across * along <= 1024 and not gated
    high = light or (across == 128 and act in KEEPS_OUTPUT and last and not more)
    return PointwiseTile(64 if high else 32, across, along, 8, 1)


def _narrow_backward_tile(
    dtype: torch.dtype, outputs: int, inputs: int, last: bool, align: int, more: bool
) -> PointwiseTile | None:
    """Return block sizes as `backward_tile` does, for float32 and for loads of single elements."""
    across = block_size(outputs)
    short = more or align == 1 or (across == 128 and not last)
    along = min(16 if short else 32, block_size(inputs))
    widest = 128 if dtype == torch.float32 and not more else 64
    if across > widest or inputs > 4 * along:
        return None
    return PointwiseTile(16, across, along, 8, 1)


def most_registers(tile: PointwiseTile, few: bool, plain: bool, more: bool) -> int | None:
    """Return the backward kernel's registers a thread where ptxas alone would spill, or None.

    It would spill for occupancy's sake. Or it would take so many that one program is alone on a
    multiprocessor, and waits: with 128 there are two of 8 warps.
    """
    if few and tile.outputs < 64 and tile.inputs <= 32:
        if tile.positions == 64:
            return 255 if tile.num_warps == 8 else None
        if tile.positions == 256 and architecture().startswith("8."):
            return 224  # its matrix products take more: 128 would spill
        return {16: 128, 32: 192, 256: 128}.get(tile.positions)
    wide = tile.outputs == 128 and (more or tile.inputs == 16)
    return 255 if few or not plain or wide else None


@tuned("outputs", "inputs", "num_warps")
def few_tile(dtype: torch.dtype, positions: int, align: int) -> PointwiseTile | None:
    """Block sizes of the backward kernel that walks the outputs; None for too many positions.

    64 inputs would read the gradients half as often, but spill for compute capability 8.0:
    `bench.tune` may choose them for others.
    """
    across, narrow = block_size(positions), dtype == torch.float32 or align == 1
    if across > (FEW // 2 if narrow else FEW):
        return None
    if narrow:
        few_warps = across <= (64 if dtype == torch.float32 else 32)
        return PointwiseTile(across, 16, 16, 4 if few_warps else 8, 1)
    outputs = 64 if across <= 64 else 32
    return PointwiseTile(across, outputs, 32, 4 if across <= 128 else 8, 2)


def splits_of(
    count: int, positions: int, inputs: int, outputs: int, programs: int, step: int
) -> int:
    """Return how many programs share a sample's positions.

    They are enough to fill a GPU, if the parts of M are small against the inputs.
    """
    small = positions * (inputs + outputs) // (16 * inputs * outputs)
    return max(1, min(triton.cdiv(ENOUGH_PROGRAMS, programs), small, positions // (8 * step)))


def column_of(t: Tensor) -> int | None:
    """Return the stride of the one axis that rows and columns form; None where they form none."""
    return merged((t.shape[2], t.stride(2)), (t.shape[3], t.stride(3)))


def folded_conv(
    x: Loaded, block: Block, residual: Loaded | None, mean: bool
) -> tuple[Tensor, Tensor]:
    """`fastlr.ops.folded.folded_conv` for a 1x1 kernel without padding."""
    stored, stride = x.tensor, block.geometry.stride
    count, inputs, height, width = stored.shape
    outputs = len(block.folded)
    size = block.geometry.output_size((height, width), (1, 1))
    if mean or not covered(stored, block.folded) or outputs * size[0] * size[1] >= INT32:
        return NotImplemented
    out = empty_output(stored, outputs, size)
    kept = out if block.activation in KEEPS_OUTPUT else torch.empty_like(out)
    positions = size[0] * size[1]
    last = channels_last(stored)
    align = alignment(stored.dtype, last, stored, out)
    column = column_of(stored) if max(stride) == 1 else None
    samples, x_sample = count, stored.stride(0)
    if column is not None and last and x.gate is None:
        sizes, steps = (count, height, width), (x_sample, *stored.stride()[2:])
        whole = merged(*zip(sizes, steps, strict=True))
        if whole is not None and count * positions < INT32:
            # One long axis: no part-filled tile but the last.
            samples, x_sample, positions, column = 1, 0, count * positions, whole
    plain = column is not None
    x_column = stored.stride(3) if column is None else column
    out_position = outputs if last else 1
    added, of_residual = None, "none"
    if residual is not None:
        added, of_residual = like(residual.tensor, out), residual.activation
    changed = x.activation != "none" or x.gate is not None
    tile = forward_tile(stored.dtype, outputs, inputs, align, changed=changed)
    tiles = triton.cdiv(positions, tile.positions), triton.cdiv(outputs, tile.outputs)
    with on_device(stored):
        launch(
            folded_pointwise_kernel,
            samples * tiles[0] * tiles[1],
            stored,
            block.folded.contiguous(),
            block.bias.contiguous(),
            added,
            x.gate,
            out,
            kept,
            x_sample,
            *stored.stride()[1:3],
            x_column,
            out.stride(0),
            out.stride(1),
            out_position,
            positions,
            size[1],
            inputs,
            outputs,
            *tiles,
            *stride,
            ACT=block.activation,
            KEEP=kept is not out,
            ADD=residual is not None,
            PLAIN=plain,
            LAST=last,
            BEFORE=x.activation,
            GATE=x.gate is not None,
            OF_RESIDUAL=of_residual,
            ALIGN=align,
            POSITIONS=tile.positions,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out, kept


def folded_conv_backward(
    x: Loaded, gradients: Gradients, kept: Tensor, block: Block, want_input: bool
) -> tuple[Tensor | None, ...]:
    """`fastlr.ops.folded.folded_conv_backward` for a 1x1 kernel without padding."""
    stored, grad = x.tensor, gradients.output
    kept = grad if block.activation == "none" else kept
    stride = block.geometry.stride
    strided, added = max(stride) > 1, gradients.loaded is not None
    # What is added has all positions of the input, not those of the output alone.
    if gradients.mean is not None or (strided and added) or (x.gate is not None and not want_input):
        return NotImplemented
    if not covered(stored, grad, kept, block.folded):
        return NotImplemented
    count, inputs, _, _ = stored.shape
    _, outputs, *size = grad.shape
    gx = stored
    if want_input:
        # Between strides nothing is written.
        gx = torch.zeros_like(stored) if strided else torch.empty_like(stored)
        if not covered(gx):
            return NotImplemented
    positions = size[0] * size[1]
    x_last = channels_last(stored) and channels_last(gx)
    g_last = channels_last(grad) and channels_last(kept)
    align = min(
        alignment(stored.dtype, x_last, stored, gx), alignment(stored.dtype, g_last, grad, kept)
    )
    tensors = (stored, gx, grad, kept)
    plain = not strided and None not in map(column_of, tensors)
    changed = added or x.activation != "none"
    tile = backward_tile(
        stored.dtype,
        outputs,
        inputs,
        x.activation if block.activation == "none" else block.activation,
        x_last and g_last,
        align,
        more=changed,
        gated=x.gate is not None,
    )
    few = tile is None
    if tile is None:
        tile = few_tile(stored.dtype, positions, align) if plain else None
        if tile is None:
            return NotImplemented
        if block.activation != "none" and tile.positions > 64:
            # Too many registers: the gradient is written first.
            g = activation_grad(grad, kept, block.activation)
            gradients = gradients._replace(output=g)
            block = block._replace(activation="none")
            return folded_conv_backward(x, gradients, g, block, want_input)
    input_tiles = triton.cdiv(inputs, tile.inputs)
    splits = 1
    if not few and x.gate is None:
        programs = count * input_tiles
        splits = splits_of(count, positions, inputs, outputs, programs, tile.positions)
    steps = triton.cdiv(triton.cdiv(positions, tile.positions), splits)
    splits = triton.cdiv(positions, steps * tile.positions)
    moments = moments_space(stored, splits, inputs, outputs, input_tiles, input_tiles)
    weight, statistics = block.weight.contiguous(), block.statistics.contiguous()
    of_gate = None if x.gate is None else torch.empty_like(x.gate)
    strides: list[int | None] = []
    for t in tensors:
        strides += [*t.stride()[:3], column_of(t) if plain else t.stride(3)]
    with on_device(stored):
        launch(
            folded_pointwise_backward_kernel,
            count * splits * input_tiles,
            stored,
            grad,
            kept,
            block.folded.contiguous(),
            weight,
            statistics,
            x.gate,
            stored if gradients.loaded is None else like(gradients.loaded, gx),
            gx,
            of_gate,
            *moments,
            *strides,
            positions,
            size[1],
            inputs,
            outputs,
            input_tiles,
            splits,
            *stride,
            steps,
            WANT_INPUT=want_input,
            X_LAST=x_last,
            G_LAST=g_last,
            ALIGN=align,
            BEFORE=x.activation,
            GRADIENT_AT_OUTPUT=x.gradient_at_output,
            GATE=x.gate is not None,
            MORE=added,
            ACT=block.activation,
            SPLIT=splits > 1,
            FEW=few,
            PLAIN=plain,
            POSITIONS=tile.positions,
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=most_registers(tile, few, plain, changed),
        )
    norms = finish_norms(*moments, weight, statistics)
    found = gx if want_input else None, *norms
    return found if of_gate is None else (*found, of_gate)
