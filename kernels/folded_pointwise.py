"""Pointwise (1x1) folded convolutions: a product with bias and activation at its end, and the whole backward pass in one.

Forward: a program makes one tile of positions x outputs. Traffic: x is read once and the output written once, and where
the derivative needs it the activation's input too; outputs wider than a tile read x again, from L2.

Backward: a program takes one sample (or a part of its positions) and walks its positions tile by tile: it loads the
gradient, what was kept and x, forms g = act'(kept) grad in registers, adds g^T x to M and writes g W, the tile of the
input gradient. M is squared at the end and never written, unless the sample was split. Traffic: 2 I + 2 O elements a
position (I + 2 O without the input gradient; one O less without activation), the least possible. Inputs that
do not fit one tile are done by several programs, each with all outputs: gradients are then read again, from L2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.activation_functions import act_derivative, act_forward
from fastlr.kernels.launching import DTYPES, INT32, merged, multiple, on_device, workspace
from fastlr.kernels.moments import (
    alignment,
    channels_last,
    covered,
    empty_output,
    finish_moments,
    like,
)
from fastlr.reference.folded import KEEPS_OUTPUT

ENOUGH_PROGRAMS = 512  # to fill a GPU with
CHEAP = ("none", "relu", "relu6", "hardswish")  # activations whose derivative takes few registers


class Tile(NamedTuple):
    """Block sizes of one program, and how it is compiled."""

    positions: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


@triton.jit
def folded_pointwise_kernel(
    x, weight, bias, residual, out, kept, x_sample, x_channel, x_row, x_column, out_sample, out_channel, out_position,
    positions, out_width, inputs, outputs, position_tiles, output_tiles, stride_h, stride_w,
    ACT: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, PLAIN: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, POSITIONS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """One tile of positions x outputs. PLAIN: the inputs of position t are t columns further. LAST: channels_last.

    ``residual``, ``out`` and ``kept`` have the same strides.
    """
    if ALIGN > 1:
        if LAST:
            inputs, outputs = multiple(inputs, ALIGN), multiple(outputs, ALIGN)
            out_position = multiple(out_position, ALIGN)
            x_row, x_column = multiple(x_row, ALIGN), multiple(x_column, ALIGN)
        else:
            positions, x_channel, out_channel = (
                multiple(positions, ALIGN), multiple(x_channel, ALIGN), multiple(out_channel, ALIGN)
            )  # fmt: skip
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
            x + (x_at[:, None] + (channel * x_channel)[None, :]), exists[:, None] & has_channel[None, :], other=0.0
        )
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
        product += tl.load(residual + base + at, mask, other=0.0).to(tl.float32)
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
    base, start, end, channel, has_channel, channel_stride, row, column, width, stride_h, stride_w,
    PLAIN: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """A tile of positions x channels, zero from position ``end`` on."""
    t = start + tl.arange(0, POSITIONS)
    at = _places(t, row, column, width, stride_h, stride_w, PLAIN)
    mask = (t < end)[:, None] & has_channel[None, :]
    return tl.load(base + (at[:, None] + (channel * channel_stride)[None, :]), mask, other=0.0)


@triton.jit
def folded_pointwise_backward_kernel(
    x, grad, kept, folded, weight, scale, gx, squares, inner, sums, parts,
    x_sample, x_channel, x_row, x_column, gx_sample, gx_channel, gx_row, gx_column,
    grad_sample, grad_channel, grad_row, grad_column, kept_sample, kept_channel, kept_row, kept_column,
    positions, out_width, inputs, outputs, input_tiles, splits, stride_h, stride_w, steps,
    ACT: tl.constexpr, WANT_INPUT: tl.constexpr, SPLIT: tl.constexpr, PLAIN: tl.constexpr, X_LAST: tl.constexpr,
    G_LAST: tl.constexpr, ALIGN: tl.constexpr,
    POSITIONS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """All positions of a sample, or ``steps`` tiles of them if SPLIT, for all outputs and one tile of the inputs.

    PLAIN: position t is t columns further in every tensor. X_LAST: x and gx are channels_last; G_LAST: grad and kept.
    """
    if ALIGN > 1:
        if X_LAST:
            inputs, x_row, x_column = multiple(inputs, ALIGN), multiple(x_row, ALIGN), multiple(x_column, ALIGN)
            gx_row, gx_column = multiple(gx_row, ALIGN), multiple(gx_column, ALIGN)
        else:
            x_channel, gx_channel = multiple(x_channel, ALIGN), multiple(gx_channel, ALIGN)
            if PLAIN:  # elsewhere the input has other positions than the output
                positions = multiple(positions, ALIGN)
        if G_LAST:
            outputs, grad_row, grad_column = (
                multiple(outputs, ALIGN), multiple(grad_row, ALIGN), multiple(grad_column, ALIGN)
            )  # fmt: skip
            kept_row, kept_column = multiple(kept_row, ALIGN), multiple(kept_column, ALIGN)
        else:
            positions, grad_channel, kept_channel = (
                multiple(positions, ALIGN), multiple(grad_channel, ALIGN), multiple(kept_channel, ALIGN)
            )  # fmt: skip
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
    grad += sample * grad_sample
    kept += sample * kept_sample
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
        grad, begin, end, output, has_output, grad_channel, grad_row, grad_column, out_width, 1, 1, PLAIN, POSITIONS
    )
    if ACT != "none":
        kept_next = _load_tile(
            kept, begin, end, output, has_output, kept_channel, kept_row, kept_column, out_width, 1, 1, PLAIN, POSITIONS
        )
    x_next = _load_tile(
        x, begin, end, channel, has_channel, x_channel, x_row, x_column, out_width, stride_h, stride_w, PLAIN, POSITIONS
    )
    for start in tl.range(begin, end, POSITIONS):
        # Gradients are loaded a tile ahead: Triton would not do that by itself for what is changed before a product, and
        # would form g anew for each of the products.
        g = g_next
        after = start + POSITIONS
        g_next = _load_tile(
            grad, after, end, output, has_output, grad_channel, grad_row, grad_column, out_width, 1, 1, PLAIN, POSITIONS
        )
        if ACT != "none":
            g = (g.to(tl.float32) * act_derivative(kept_next.to(tl.float32), ACT)).to(g.dtype)
            kept_next = _load_tile(
                kept, after, end, output, has_output, kept_channel, kept_row, kept_column, out_width, 1, 1, PLAIN,
                POSITIONS,
            )  # fmt: skip
        x_tile = x_next
        x_next = _load_tile(
            x, after, end, channel, has_channel, x_channel, x_row, x_column, out_width, stride_h, stride_w, PLAIN,
            POSITIONS,
        )  # fmt: skip
        across = tl.trans(g)
        product = tl.dot(across, x_tile, product, input_precision="ieee")
        total = tl.dot(across, ones, total, input_precision="ieee")  # the sum over positions, without a reduction
        if WANT_INPUT:
            g_in = tl.dot(g, forward, input_precision="ieee").to(gx.dtype.element_ty)
            t = start + tl.arange(0, POSITIONS)
            gx_at = _places(t, gx_row, gx_column, out_width, stride_h, stride_w, PLAIN)
            mask = (t < end)[:, None] & has_channel[None, :]
            tl.store(gx + (gx_at[:, None] + (channel * gx_channel)[None, :]), g_in, mask)

    total_g = tl.max(total, 1)  # its columns are equal
    if SPLIT:
        at = sample * splits + split
        tl.store(parts + at * inputs * outputs + (channel[None, :] * outputs + output[:, None]), product, both)
        if input_tile == 0:
            tl.store(sums + at * outputs + output, total_g, has_output)
    else:
        w = tl.load(weight + weights_at, both, other=0.0).to(tl.float32)
        tl.store(inner + (sample * input_tiles + input_tile) * outputs + output, tl.sum(w * product, 1), has_output)
        if input_tile == 0:
            tl.store(sums + sample * outputs + output, total_g, has_output)
        s = tl.load(scale + output, has_output, other=0.0).to(tl.float32)
        product *= s[:, None]
        tl.store(squares + program, tl.sum(product * product))


def block(n: int) -> int:
    """The size of a block that holds ``n``: a power of two, 16 at least, as products need."""
    return max(16, triton.next_power_of_2(n))


def forward_tile(dtype: torch.dtype, outputs: int, inputs: int, align: int) -> Tile:
    """Block sizes of the forward kernel."""
    if dtype == torch.float32 or align == 1:
        return Tile(32, min(64, block(outputs)), 16, 4, 1 if align == 1 else 2)
    across = min(128, block(outputs))
    return Tile(128, across, min(64, block(inputs)), 8 if across == 128 else 4, 3)


def backward_tile(dtype: torch.dtype, outputs: int, inputs: int, act: str, last: bool, align: int) -> Tile | None:
    """Block sizes of the backward kernel; None where it would spill or there are too many inputs: plain torch serves.

    ``last``: everything is channels_last. A stage only: Triton's own pipeline fails on three products in one loop for
    compute capability 10.0 (3.6).
    """
    across, cheap = block(outputs), act in CHEAP
    if dtype == torch.float32 or align == 1:
        along = min(16 if across == 128 and not last or align == 1 else 32, block(inputs))
        fits = across <= (128 if dtype == torch.float32 else 64) and inputs <= 4 * along
        return Tile(16, across, along, 8, 1) if fits else None
    if across > (256 if last else 128 if cheap else 64):
        return None
    along = min(128, (8192 if last else 4096) // across, max(block(inputs), 32 if across == 256 else 16))
    if inputs > 4 * along:
        return None
    if cheap and across <= 64 and along <= 32 and 512 <= across * along:
        return Tile(64, across, along, 4, 1)
    high = across * along <= 1024 or across == 128 and act in KEEPS_OUTPUT and last
    return Tile(64 if high else 32, across, along, 8, 1)


def splits_of(count: int, positions: int, inputs: int, outputs: int, programs: int, step: int) -> int:
    """How many programs share a sample's positions: enough to fill a GPU, if the parts of M are small against the inputs."""
    small = positions * (inputs + outputs) // (16 * inputs * outputs)
    return max(1, min(triton.cdiv(ENOUGH_PROGRAMS, programs), small, positions // (8 * step)))


def folded_conv(
    x: Tensor, weight: Tensor, bias: Tensor, act: str, stride: tuple[int, int], residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`fastlr.reference.folded.folded_conv` for a 1x1 kernel without padding; x [B, C, H, W]."""
    count, inputs, height, width = x.shape
    outputs = len(weight)
    size = [(height - 1) // stride[0] + 1, (width - 1) // stride[1] + 1]
    if not covered(x, weight) or outputs * size[0] * size[1] >= INT32:
        return NotImplemented
    out = empty_output(x, outputs, size)
    kept = out if act in KEEPS_OUTPUT else torch.empty_like(out)
    residual = None if residual is None else like(residual, out)
    weight, bias = weight.contiguous(), bias.contiguous()
    positions = size[0] * size[1]
    last = channels_last(x)
    align = alignment(x.dtype, last, x, out)
    column = merged((height, x.stride(2)), (width, x.stride(3))) if max(stride) == 1 else None
    samples, x_sample = count, x.stride(0)
    if column is not None and last:
        whole = merged((count, x.stride(0)), (height, x.stride(2)), (width, x.stride(3)))
        if whole is not None and count * positions < INT32:  # one long axis: no part-filled tile but the last
            samples, x_sample, positions, column = 1, 0, count * positions, whole
    tile = forward_tile(x.dtype, outputs, inputs, align)
    tiles = triton.cdiv(positions, tile.positions), triton.cdiv(outputs, tile.outputs)
    with on_device(x):
        folded_pointwise_kernel[(samples * tiles[0] * tiles[1],)](
            x, weight, bias, residual, out, kept, x_sample, x.stride(1), x.stride(2),
            x.stride(3) if column is None else column,
            out.stride(0), out.stride(1), outputs if last else 1,
            positions, size[1], inputs, outputs, *tiles, *stride,
            ACT=act, KEEP=kept is not out, ADD=residual is not None, PLAIN=column is not None, LAST=last, ALIGN=align,
            POSITIONS=tile.positions, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out, kept


def folded_conv_backward(
    x: Tensor, grad: Tensor, kept: Tensor, act: str, folded: Tensor, weight: Tensor, scale: Tensor,
    stride: tuple[int, int], want_input: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
    """`fastlr.reference.folded.folded_conv_backward` for a 1x1 kernel without padding; x [B, C, H, W]."""
    kept = grad if act == "none" else kept
    if not covered(x, grad, kept, folded):
        return NotImplemented
    count, inputs, height, width = x.shape
    _, outputs, *size = grad.shape
    gx = x
    if want_input:
        gx = torch.empty_like(x) if max(stride) == 1 else torch.zeros_like(x)  # between strides nothing is written
        if not covered(gx):
            return NotImplemented
    folded, weight, scale = folded.contiguous(), weight.contiguous(), scale.contiguous()
    positions = size[0] * size[1]
    tensors = (x, gx, grad, kept)
    x_last, g_last = channels_last(x) and channels_last(gx), channels_last(grad) and channels_last(kept)
    align = min(alignment(x.dtype, x_last, x, gx), alignment(x.dtype, g_last, grad, kept))
    tile = backward_tile(x.dtype, outputs, inputs, act, x_last and g_last, align)
    if tile is None:
        return NotImplemented
    columns = [merged((t.shape[2], t.stride(2)), (t.shape[3], t.stride(3))) for t in tensors]
    plain = max(stride) == 1 and None not in columns
    strides = [
        s
        for t, column in zip(tensors, columns, strict=True)
        for s in (*t.stride()[:3], column if plain else t.stride(3))
    ]
    input_tiles = triton.cdiv(inputs, tile.inputs)
    splits = splits_of(count, positions, inputs, outputs, count * input_tiles, tile.positions)
    steps = triton.cdiv(triton.cdiv(positions, tile.positions), splits)
    splits = triton.cdiv(positions, steps * tile.positions)
    device = x.device
    sums = workspace(count, splits, outputs, device=device)
    squares, inner, parts = sums, sums, sums  # not looked at
    if splits > 1:
        parts = workspace(count, splits, inputs, outputs, device=device)
    else:
        squares = workspace(count, input_tiles, device=device)
        inner = workspace(count, input_tiles, outputs, device=device)
    with on_device(x):
        folded_pointwise_backward_kernel[(count * splits * input_tiles,)](
            x, grad, kept, folded, weight, scale, gx, squares, inner, sums, parts, *strides,
            positions, size[1], inputs, outputs, input_tiles, splits, *stride, steps,
            ACT=act, WANT_INPUT=want_input, SPLIT=splits > 1, PLAIN=plain, X_LAST=x_last, G_LAST=g_last, ALIGN=align,
            POSITIONS=tile.positions, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    if splits > 1:
        moments = finish_moments(parts, sums, weight, scale)
    else:
        moments = squares.sum(1, dtype=torch.float64), inner.sum(1) if input_tiles > 1 else inner[:, 0], sums[:, 0]
    return gx if want_input else None, *moments


def _case(name: str, dtype: str, kernel: triton.JITFunction, tile: Tile, last: bool, constants: dict) -> tuple:
    """A variant to compile: what is no constant has the dtype of its name or is an int32."""
    kinds = dict.fromkeys(("x", "gx", "grad", "kept", "out", "residual", "folded"), f"*{dtype}")
    kinds |= dict.fromkeys(("weight", "bias", "scale", "squares", "inner", "sums", "parts"), "*fp32")
    if kernel is folded_pointwise_kernel:
        kinds["weight"] = f"*{dtype}"
    one = ("x_channel", "gx_channel", "grad_channel", "kept_channel", "out_channel")
    if not last:
        one = ("x_column", "gx_column", "grad_column", "kept_column", "out_position")
    blocks = {"POSITIONS": tile.positions, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs}
    constants = {**blocks, **constants} | {key: 1 for key in one if key in kernel.arg_names}
    if constants["PLAIN"]:
        constants |= {"stride_h": 1, "stride_w": 1}
    signature = {key: kinds.get(key, "i32") for key in kernel.arg_names if key not in constants}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "divisible": "pointers"}
    name = f"{name}[{dtype},{tile.positions}x{tile.outputs}x{tile.inputs}{',channels_last' * last}]"
    return name, kernel, signature, constants, options


def compile_cases() -> list[tuple]:
    """Variants to compile ahead of time in the tests: every tile, with the activations that take most registers."""
    cases, seen = {}, set()

    def add(
        name: str, dtype: str, kernel: triton.JITFunction, tile: Tile | None, last: bool, **constants: object
    ) -> None:
        if tile is not None:
            layout = {"LAST": last} if kernel is folded_pointwise_kernel else {"X_LAST": last, "G_LAST": last}
            case = _case(name, dtype, kernel, tile, last, {**layout, **constants})
            cases.setdefault(case[0], case)

    names = {name: dtype for dtype, name in DTYPES.items()}
    for dtype, sizes in (("bf16", (16, 32, 64, 128, 256)), ("fp16", (64, 256)), ("fp32", (16, 32, 64, 128))):
        wide = 4 if dtype == "fp32" else 8
        for outputs in sizes:
            for inputs in sizes:
                for last, align in ((True, wide), (False, wide), (True, 1), (False, 1)):
                    how = {"PLAIN": True, "ALIGN": align}
                    odd = "-odd" * (align == 1)
                    tile = forward_tile(names[dtype], outputs, inputs, align)
                    add(
                        "forward" + odd,
                        dtype,
                        folded_pointwise_kernel,
                        tile,
                        last,
                        ACT="gelu",
                        KEEP=True,
                        ADD=True,
                        **how,
                    )
                    for act in ("gelu", "hardswish", "relu"):
                        tile = backward_tile(names[dtype], outputs, inputs, act, last, align)
                        key = (dtype, tile, last, odd)
                        main = act == "hardswish" and dtype == "bf16" and last and not odd
                        if main or key not in seen:
                            seen.add(key)
                            how |= {"ACT": act, "WANT_INPUT": True, "SPLIT": False}
                            name = f"backward-{act}{odd}"
                            add(name, dtype, folded_pointwise_backward_kernel, tile, last, **how)
    for outputs, inputs in ((64, 16), (32, 128), (128, 64), (256, 32)):
        tile = backward_tile(torch.bfloat16, outputs, inputs, "hardswish", True, 8)
        how = {"ACT": "hardswish", "WANT_INPUT": True, "SPLIT": True, "PLAIN": True, "ALIGN": 8}
        add("backward-split", "bf16", folded_pointwise_backward_kernel, tile, True, **how)
        add("backward-strided", "bf16", folded_pointwise_backward_kernel, tile, True, **(how | {"PLAIN": False}))
        add("backward-norms", "bf16", folded_pointwise_backward_kernel, tile, True, **(how | {"WANT_INPUT": False}))
    add("forward-strided", "bf16", folded_pointwise_kernel, forward_tile(torch.bfloat16, 128, 64, 8), True,
        ACT="gelu", KEEP=True, ADD=True, PLAIN=False, ALIGN=8)  # fmt: skip
    return list(cases.values())
