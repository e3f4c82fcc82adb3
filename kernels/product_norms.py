"""Per-sample squared norms of weight gradients by tile: what linear_norms and conv_norms launch.

One program takes one sample, one group and one tile of the weight: it adds up M = sum_t g_t x_t^T
over the sample's rows (positions) in fp32 registers and writes one number, the tile's squared norm.
The folded form weighs the squares by s_c^2 and adds <W_c, M_c> for each channel and tile of inputs
and S_c = sum_t g_ct for each channel; M itself is never written.

The limit is reading x and g once: rows (inputs + outputs) elements a sample, and nothing of that
size is written. A side wider than a tile makes the other side be read again for each of its tiles,
by programs next to each other, so from L2. Partial sums go to a workspace, every element of which
is written, and are added up in a fixed order (torch, finish_norms).
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.launching import (
    architecture,
    launch,
    merged,
    multiple,
    on_device,
    workspace,
)


class Tile(NamedTuple):
    """Block sizes of one program, and how it is compiled."""

    outputs: int
    columns: int
    rows: int
    num_warps: int
    num_stages: int


class Operand(NamedTuple):
    """A tensor and its strides; the positions of a sample are its images x rows x columns."""

    tensor: Tensor
    sample: int
    group: int
    channel: int
    image: int
    row: int
    column: int


class Window(NamedTuple):
    """How an output position meets the inputs: sizes of input and output, the kernel, its steps."""

    height: int
    width: int
    out_height: int
    out_width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


class Sizes(NamedTuple):
    """Samples, groups, rows of a sample (its images' positions), inputs and outputs of a group."""

    count: int
    groups: int
    rows: int
    inputs: int
    outputs: int


_UNIT = (
    "x_channel",
    "x_column",
    "g_channel",
    "g_column",
)  # strides of which one is 1: a constant then
_SIZES = (
    "x_sample",
    "x_group",
    "x_image",
    "x_row",
    "g_sample",
    "g_group",
    "g_image",
    "g_row",
    "groups",
    "rows",
    "inputs",
    "outputs",
    "output_tiles",
    "column_tiles",
    "height",
    "width",
    "positions",
    "out_width",
    "kernel_width",
    "taps",
    "stride_h",
    "stride_w",
    "padding_h",
    "padding_w",
    "dilation_h",
    "dilation_w",
    "weight_channel",
    "weight_tap",
)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNIT)
def product_norms_kernel(
    x,
    g,
    weight,
    scale,
    squares,
    inner,
    sums,
    x_sample,
    x_group,
    x_channel,
    x_image,
    x_row,
    x_column,
    g_sample,
    g_group,
    g_channel,
    g_image,
    g_row,
    g_column,
    groups,
    rows,
    inputs,
    outputs,
    output_tiles,
    column_tiles,
    height,
    width,
    positions,
    out_width,
    kernel_width,
    taps,
    stride_h,
    stride_w,
    padding_h,
    padding_w,
    dilation_h,
    dilation_w,
    weight_channel,
    weight_tap,
    X_PLAIN: tl.constexpr,
    G_PLAIN: tl.constexpr,
    X_LAST: tl.constexpr,
    G_LAST: tl.constexpr,
    PACKED: tl.constexpr,
    FOLDED: tl.constexpr,
    ALIGN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One tile of one sample's weight gradient.

    PLAIN: row t is t columns further, no window. LAST: channels are next to each other in memory.
    PACKED: a tile's columns run over taps and inputs; otherwise over the inputs of one tap, which
    keeps the window out of the inner axis. ALIGN divides what vector loads need it to divide (see
    `alignment`): Triton alone takes note of 16 only.
    """
    if ALIGN > 1:
        if X_LAST and not PACKED:
            inputs, x_column = multiple(inputs, ALIGN), multiple(x_column, ALIGN)
            x_image, x_row = multiple(x_image, ALIGN), multiple(x_row, ALIGN)
        elif X_PLAIN:
            rows, x_channel = multiple(rows, ALIGN), multiple(x_channel, ALIGN)
        if G_LAST:
            outputs, g_column = multiple(outputs, ALIGN), multiple(g_column, ALIGN)
            g_image, g_row = multiple(g_image, ALIGN), multiple(g_row, ALIGN)
        else:
            rows, g_channel = multiple(rows, ALIGN), multiple(g_channel, ALIGN)
    tile = tl.program_id(0)
    output_tile, rest = tile % output_tiles, tile // output_tiles
    column_tile, rest = rest % column_tiles, rest // column_tiles
    group, sample = (rest % groups).to(tl.int64), (rest // groups).to(tl.int64)

    output = output_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    has_output = output < outputs
    g += sample * g_sample + group * g_group
    x += sample * x_sample + group * x_group
    if ALIGN > 1:
        bytes: tl.constexpr = ALIGN * x.dtype.element_ty.primitive_bitwidth // 8
        g = tl.multiple_of(g, bytes)
        if X_PLAIN or (X_LAST and not PACKED):  # elsewhere windows leave nothing aligned
            x = tl.multiple_of(x, bytes)
    if X_PLAIN:
        channel = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        has_column = channel < inputs
        tap = tl.zeros([1], tl.int32)
    elif PACKED:
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        has_column = column < inputs * taps
        channel, tap = column % inputs, column // inputs
    else:
        tiles = tl.cdiv(inputs, COLUMNS)
        channel = column_tile % tiles * COLUMNS + tl.arange(0, COLUMNS)
        has_column = channel < inputs
        tap = tl.zeros([1], tl.int32) + column_tile // tiles
    out_height = positions // out_width
    first_row = tap // kernel_width * dilation_h - padding_h
    first_column = tap % kernel_width * dilation_w - padding_w

    ONWARD: tl.constexpr = PACKED or X_LAST  # with single elements loaded, it would spill
    product = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    total = tl.zeros([OUTPUTS, ROWS if PACKED else 1], tl.float32)
    first = tl.arange(0, ROWS)
    image, place = first // positions, first % positions
    y_out, x_out = place // out_width, place % out_width
    for start in range(0, rows, ROWS):
        t = start + first
        exists = t < rows
        if not ONWARD:
            image, place = t // positions, t % positions
            y_out, x_out = place // out_width, place % out_width
        if X_PLAIN:
            x_at = (t * x_column)[:, None]
            seen = exists[:, None]
        else:
            y, z = (
                (y_out * stride_h)[:, None] + first_row[None, :],
                (x_out * stride_w)[:, None] + first_column[None, :],
            )
            if PACKED:
                corner = image * x_image + y_out * stride_h * x_row + x_out * stride_w * x_column
                x_at = corner[:, None] + (first_row * x_row + first_column * x_column)[None, :]
            else:
                x_at = (image * x_image)[:, None] + y * x_row + z * x_column
            seen = exists[:, None] & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        g_at = t * g_column if G_PLAIN else image * g_image + y_out * g_row + x_out * g_column
        x_tile = tl.load(
            x + (x_at + (channel * x_channel)[None, :]), seen & has_column[None, :], other=0.0
        )
        g_tile = tl.load(
            g + ((output * g_channel)[:, None] + g_at[None, :]),
            has_output[:, None] & exists[None, :],
            other=0.0,
        )
        product = tl.dot(g_tile, x_tile, product, input_precision="ieee")
        if FOLDED:
            if column_tile == 0:
                if PACKED:  # few outputs, whose positions are added up at the end
                    total += g_tile.to(tl.float32)
                else:
                    total += tl.sum(g_tile.to(tl.float32), 1, keep_dims=True)
        if ONWARD:  # by ROWS positions, with carries in place of divisions
            x_out += ROWS % out_width
            y_out += ROWS % positions // out_width + (x_out >= out_width)
            x_out -= tl.where(x_out >= out_width, out_width, 0)
            image += ROWS // positions + (y_out >= out_height)
            y_out -= tl.where(y_out >= out_height, out_height, 0)

    if FOLDED:
        at = group * outputs + output  # the channel among all groups
        weight += group * outputs * (inputs * taps)  # [O, C, kernel] or, in memory, [O, kernel, C]
        if X_PLAIN:
            w = output[:, None] * inputs + channel[None, :]
        else:
            w = (
                output[:, None] * (inputs * taps)
                + (channel * weight_channel + tap * weight_tap)[None, :]
            )
        w = tl.load(weight + w, has_output[:, None] & has_column[None, :], other=0.0).to(tl.float32)
        place = (sample * column_tiles + column_tile) * (groups * outputs) + at
        tl.store(inner + place, tl.sum(w * product, 1), has_output)
        if column_tile == 0:
            tl.store(sums + sample * (groups * outputs) + at, tl.sum(total, 1), has_output)
        product *= tl.load(scale + at, has_output, other=0.0).to(tl.float32)[:, None]
    tl.store(squares + tile, tl.sum(product * product))


def choose_tile(
    dtype: torch.dtype, outputs: int, columns: int, *, vector: bool, packed: bool, folded: bool
) -> Tile:
    """Block sizes for a weight gradient of this shape: a side that fits one tile is read once only.

    Tiles are smaller where registers are short: float32 products run on the ordinary units, whose
    operands take them; loads of single elements cannot be sent past them. The folded form holds a
    tile of the weight at the end, and does much beside its products: four programs of four warps on
    a multiprocessor wait less than one of eight (see `most_registers`). Packed ones gather single
    elements: few warps, each many at once.
    """
    across, along = _side(outputs), _side(columns)
    if packed or dtype == torch.float32:
        side = min(64, max(across, along))
        if dtype == torch.float32:
            return Tile(side, side, 16, 8, 2 if packed else 3)
        return Tile(16 if outputs <= 16 else side, side, 2048 // side, side // 8, 3)
    if folded:
        across, along = min(64, across), min(64, along)
    elif across == along == 128 and not vector:
        across = 64
    if not vector:
        return Tile(max(across, 64), max(along, 64), 16 if folded else 32, 8, 3)
    return Tile(across, along, 64, 8 if across * along > 8192 else 4, 3)


def most_registers(tile: Tile, folded: bool) -> int | None:
    """Return the registers a thread of the folded form's largest tile of four warps; None: ptxas'.

    With 128 there are four programs on a multiprocessor, with the 158 that ptxas takes three; for
    compute capability 8.0 they would spill. On an H200 such a form took 0.9 of the time that its
    instructions predict, and one of eight warps, alone on a multiprocessor, 2.6 times that
    (bench/results/h200).
    """
    is_largest = tile.outputs == tile.columns == 64 and tile.num_warps == 4
    return 128 if folded and is_largest and not architecture().startswith("8.") else None


def _side(n: int) -> int:
    """Return the side of a tile for ``n`` channels."""
    if n <= 32:
        return 32
    return 64 if n <= 64 else 128


def alignment(x: Operand | None, g: Operand, sizes: Sizes, *, window: bool, g_plain: bool) -> int:
    """Return the elements that can be loaded at once: as many as make 16 or 8 bytes, or 1.

    Without x: x is loaded one by one anyway.

    Where a contiguous run starts and how long it is must be multiples of it: along channels or
    along positions.
    """
    itemsize = g.tensor.element_size()
    numbers = [0]
    for operand, plain, width in ((x, not window, sizes.inputs), (g, g_plain, sizes.outputs)):
        if operand is None:
            continue
        if operand.tensor.data_ptr() % 16:
            return 1
        numbers += [operand.sample, operand.group if sizes.groups > 1 else 0]
        if operand.channel == 1:
            numbers += [width, operand.column, *(() if plain else (operand.image, operand.row))]
        elif operand.column == 1 and plain:
            numbers += [sizes.rows, operand.channel]
        else:
            return 1
    counts = (16 // itemsize,) if window or itemsize == 4 else (8, 4)
    for n in counts:
        if not any(k % n for k in numbers):
            return n
    return 1


def product_norms(
    x: Operand,
    g: Operand,
    sizes: Sizes,
    window: Window | None = None,
    folded: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return parts [B, tiles] of the squared norms, parts of <W, M>, and sums [B, O].

    Parts of <W, M> [B, tiles, O] are of the folded form (weight, scale) alone.

    Without a window, row t of both operands is ``t * column``; positions that form one axis in
    memory are best given so.
    """
    g_plain, taps, packed = True, 1, False
    shape = (1, sizes.rows, sizes.rows, sizes.rows, 1, 1, 1, 1, 0, 0, 1, 1)
    if window:
        positions, taps = window.out_height * window.out_width, prod(window.kernel)
        packed = sizes.inputs < 32
        images = (sizes.rows // positions, window.out_height, window.out_width)
        column = merged(*zip(images, (g.image, g.row, g.column), strict=True))
        g_plain = column is not None
        g = g._replace(column=column) if g_plain else g
        shape = (window.height, window.width, positions, window.out_width, window.kernel[1], taps)
        shape += (*window.stride, *window.padding, *window.dilation)
    x_vectors = window is None or (x.channel == 1 and not packed)
    align = alignment(
        x if x_vectors else None, g, sizes, window=window is not None, g_plain=g_plain
    )
    columns = sizes.inputs * taps if packed else sizes.inputs
    tile = choose_tile(
        x.tensor.dtype,
        sizes.outputs,
        columns,
        vector=x_vectors and align > 1,
        packed=packed,
        folded=folded is not None,
    )
    output_tiles = triton.cdiv(sizes.outputs, tile.outputs)
    column_tiles = triton.cdiv(columns, tile.columns) * (1 if packed else taps)
    programs = sizes.count * sizes.groups * column_tiles * output_tiles
    device = x.tensor.device
    squares = workspace(programs, device=device)
    weight = scale = inner = sums = squares  # not looked at
    steps = taps, 1  # from channel to channel and from tap to tap of the weight
    if folded:
        weight, scale = folded
        if not weight.is_contiguous():
            last = weight.is_contiguous(memory_format=torch.channels_last)
            weight, steps = (weight, (1, weight.shape[1])) if last else (weight.contiguous(), steps)
        inner = workspace(sizes.count, column_tiles, sizes.groups * sizes.outputs, device=device)
        sums = workspace(sizes.count, sizes.groups * sizes.outputs, device=device)
    with on_device(x.tensor):
        launch(
            product_norms_kernel,
            programs,
            x.tensor,
            g.tensor,
            weight,
            scale,
            squares,
            inner,
            sums,
            *x[1:],
            *g[1:],
            *sizes[1:],
            output_tiles,
            column_tiles,
            *shape,
            *steps,
            X_PLAIN=window is None,
            G_PLAIN=g_plain,
            X_LAST=x.channel == 1,
            G_LAST=g.channel == 1,
            PACKED=packed,
            FOLDED=folded is not None,
            ALIGN=align,
            OUTPUTS=tile.outputs,
            COLUMNS=tile.columns,
            ROWS=tile.rows,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=most_registers(tile, folded is not None),
        )
    return squares.view(sizes.count, -1), inner, sums
