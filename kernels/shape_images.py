"""Shape images in Triton, written once and read never.

The bits are those of ``fastlr.ops.shape_images.shape_images``.

Two launches. ``draw_shapes_kernel`` runs Philox once an image (a lane an image) and stores each
shape as eight int32. ``paint_kernel`` takes one tile of one image: it paints packed 8-bit colours
in registers, looks up the output value of each byte (normalisation and rounding to the output's
dtype are in the table) and stores the pixels in either memory format. Every step is integer
arithmetic or a look-up, so there is nothing to round differently.

The limit is the writing of the output (at 4.3 TB/s, 5000 images of 224 x 224 in bf16: 0.35 ms).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlr.kernels.counter import halves, philox4x32
from fastlr.kernels.launching import launch, on_device
from fastlr.ops.philox import STREAMS, check_index, check_seed
from fastlr.ops.shape_images import (
    CIRCLE_RADII,
    RECTANGLE_SIDES,
    check_images,
    resolve_table,
    shape_bounds,
)

_STREAM = tl.constexpr(STREAMS["shapes"])
# Larger than any squared distance inside an image of at most 2**14 pixels a side; _OUTSIDE twice
# still fits int32.
_EVERYWHERE = tl.constexpr(1 << 29)
_OUTSIDE = tl.constexpr((1 << 29) + 1)
# Colour, top, bottom, left, right, centre row, centre column, squared radius.
_FIELDS = tl.constexpr(8)

TILE_ROWS, TILE_COLUMNS, IMAGES_PER_PROGRAM = 32, 32, 64


@triton.jit
def _below(word, bound):
    """A uniform integer in [0, bound) from a 32-bit word: the high half of the product."""
    return tl.umulhi(word, (tl.zeros(word.shape, tl.int32) + bound).to(tl.uint32)).to(tl.int32)


@triton.jit
def _between(word, least, greatest):
    """A uniform integer in [least, greatest]."""
    return least + _below(word, greatest - least + 1)


@triton.jit(
    do_not_specialize=[
        "n",
        "seed_low",
        "seed_high",
        "height",
        "width",
        "low_h",
        "high_h",
        "low_w",
        "high_w",
        "low_r",
        "high_r",
    ]
)
# Counts are constexpr: range() over a run-time value fails in the interpreter with NumPy 2.4.
def draw_shapes_kernel(
    shapes,
    index,
    n,
    seed_low,
    seed_high,
    height,
    width,
    low_h,
    high_h,
    low_w,
    high_w,
    low_r,
    high_r,
    EACH: tl.constexpr,
    RECTANGLES: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the canvas and the shapes of ``n`` images to ``shapes`` ``[n, 1 + S, 8]`` int32.

    Shapes are in painting order.

    ``index`` points to the low and the high 32 bits of each image's number; unless EACH, of the
    first one's, on from which they are counted. Being on the device, it may change when a CUDA
    graph is replayed.
    """
    image = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = image < n
    if EACH:
        low = tl.load(index + 2 * image, exists, 0).to(tl.uint32, bitcast=True)
        high = tl.load(index + 2 * image + 1, exists, 0).to(tl.uint32, bitcast=True)
    else:
        start = tl.zeros([BLOCK], tl.uint32) + tl.load(index).to(tl.uint32, bitcast=True)
        low = tl.add(start, image.to(tl.uint32), sanitize_overflow=False)
        high = tl.zeros([BLOCK], tl.uint32) + tl.load(index + 1).to(tl.uint32, bitcast=True)
        high = tl.add(high, (low < start).to(tl.uint32), sanitize_overflow=False)
    k0 = tl.zeros([BLOCK], tl.uint32) + seed_low.to(tl.uint32, bitcast=True)
    k1 = tl.zeros([BLOCK], tl.uint32) + seed_high.to(tl.uint32, bitcast=True)
    stream = tl.full([BLOCK], _STREAM, tl.uint32)

    out = shapes + image.to(tl.int64) * ((1 + COUNT) * _FIELDS)
    _, colour, _, _ = philox4x32(tl.zeros([BLOCK], tl.uint32), stream, low, high, k0, k1)
    tl.store(out, colour.to(tl.int32, bitcast=True), exists)

    left_over = tl.full([BLOCK], RECTANGLES, tl.int32)
    for step in range(COUNT):
        block = tl.zeros([BLOCK], tl.uint32) + 2 * step + 2
        kind, colour, w2, w3 = philox4x32(block, stream, low, high, k0, k1)
        w4, w5, _, _ = philox4x32(block + 1, stream, low, high, k0, k1)
        is_rectangle = _below(kind, COUNT - step) < left_over
        left_over -= is_rectangle.to(tl.int32)
        y, x = _below(w2, height), _below(w3, width)
        h, w, radius = (
            _between(w4, low_h, high_h),
            _between(w5, low_w, high_w),
            _between(w4, low_r, high_r),
        )
        top, left = (
            tl.where(is_rectangle, y - h // 2, y - radius),
            tl.where(is_rectangle, x - w // 2, x - radius),
        )
        out += _FIELDS
        tl.store(out, colour.to(tl.int32, bitcast=True), exists)
        tl.store(out + 1, top, exists)
        tl.store(out + 2, tl.where(is_rectangle, top + h, y + radius + 1), exists)
        tl.store(out + 3, left, exists)
        tl.store(out + 4, tl.where(is_rectangle, left + w, x + radius + 1), exists)
        tl.store(out + 5, y, exists)
        tl.store(out + 6, x, exists)
        tl.store(out + 7, tl.where(is_rectangle, _EVERYWHERE, radius * radius), exists)


@triton.jit
def paint_kernel(
    out,
    shapes,
    table,
    height,
    width,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Paint one tile of ROWS x COLUMNS pixels of one image."""
    tiles_across = tl.cdiv(width, COLUMNS)
    tiles = tl.cdiv(height, ROWS) * tiles_across
    image, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first_row, first_column = tile // tiles_across * ROWS, tile % tiles_across * COLUMNS
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)

    shape = shapes + image.to(tl.int64) * ((1 + COUNT) * _FIELDS)
    canvas = tl.zeros([ROWS, COLUMNS], tl.int32) + tl.load(shape)
    for _ in range(COUNT):
        shape += _FIELDS
        top, bottom, left, right = (
            tl.load(shape + 1),
            tl.load(shape + 2),
            tl.load(shape + 3),
            tl.load(shape + 4),
        )
        # Most shapes miss most tiles.
        if (
            (top < first_row + ROWS)
            & (bottom > first_row)
            & (left < first_column + COLUMNS)
            & (right > first_column)
        ):
            colour, y, x, limit = (
                tl.load(shape),
                tl.load(shape + 5),
                tl.load(shape + 6),
                tl.load(shape + 7),
            )
            dy2 = tl.where((row >= top) & (row < bottom), (row - y) * (row - y), _OUTSIDE)
            dx2 = tl.where(
                (column >= left) & (column < right), (column - x) * (column - x), _OUTSIDE
            )
            canvas = tl.where(dy2[:, None] + dx2[None, :] <= limit, colour, canvas)

    exists = (row < height)[:, None] & (column < width)[None, :]
    pixels = height * width
    out += image.to(tl.int64) * (pixels * CHANNELS)
    offset = row[:, None] * width + column[None, :]
    for channel in tl.static_range(CHANNELS):
        value = tl.load(table + channel * 256 + ((canvas >> (8 * channel)) & 0xFF))
        if CHANNELS_LAST:
            tl.store(out + offset * CHANNELS + channel, value, exists)
        else:
            tl.store(out + channel * pixels + offset, value, exists)


def shape_images_from(first: Tensor, n: int, **options: Any) -> Tensor:
    """Return ``n`` images from the number in ``first`` on, which is read when the kernel runs.

    ``first`` is ``[1]`` int64, on the device.
    """
    return _draw_and_paint(first, n, each=False, **options)


def shape_images_at(index: Tensor, **options: Any) -> Tensor:
    """Return the images numbered ``index`` (``[n]`` int64, on the device).

    See the function of this name in the reference.
    """
    return _draw_and_paint(check_index(index), len(index), each=True, **options)


def _draw_and_paint(
    index: Tensor,
    n: int,
    *,
    each: bool,  # index has the number of each image; else of the first one
    size: tuple[int, int, int] = (3, 224, 224),
    rectangles: int = 5,
    circles: int = 5,
    seed: int = 0,
    table: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    rectangle_sides: tuple[float, float] = RECTANGLE_SIDES,
    circle_radii: tuple[float, float] = CIRCLE_RADII,
) -> Tensor:
    device = index.device
    if index.data_ptr() % 16:
        index = index.clone()  # compared was the variant for aligned memory
    size = channels, height, width = check_images(size, rectangles, circles)
    bounds = shape_bounds(height, width, rectangle_sides, circle_radii)
    table = resolve_table(table, channels, dtype, device)
    count = rectangles + circles
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(n, *size, dtype=dtype, device=device, memory_format=memory_format)
    shapes = torch.empty(n, 1 + count, _FIELDS.value, dtype=torch.int32, device=device)
    tiles = triton.cdiv(height, TILE_ROWS) * triton.cdiv(width, TILE_COLUMNS)
    with on_device(out):
        launch(
            draw_shapes_kernel,
            triton.cdiv(n, IMAGES_PER_PROGRAM),
            shapes,
            index.view(torch.int32),
            n,
            *halves(check_seed(seed)),
            height,
            width,
            *bounds,
            EACH=each,
            RECTANGLES=rectangles,
            COUNT=count,
            BLOCK=IMAGES_PER_PROGRAM,
        )
        launch(
            paint_kernel,
            n * tiles,
            out,
            shapes,
            table,
            height,
            width,
            COUNT=count,
            CHANNELS=channels,
            CHANNELS_LAST=channels_last,
            ROWS=TILE_ROWS,
            COLUMNS=TILE_COLUMNS,
        )
    return out
