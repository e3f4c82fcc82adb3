"""Synthetic images of random shapes, the vision inputs of the paper.

Section 3.6, "Synthetic Memorization Datasets".

The definition, in plain torch; ``kernels/shape_images.py`` is the same op in Triton, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.ops.philox import (
    STREAMS,
    check_index,
    check_seed,
    indices,
    random_words,
    uniform_integers,
)

MAX_SIDE = 1 << 14
# Least and greatest, as shares of the image's side.
RECTANGLE_SIDES, CIRCLE_RADII = (
    (1 / 8, 1 / 2),
    (1 / 16, 1 / 4),
)
_OUTSIDE = (
    1 << 29
) + 1  # more than any squared distance inside the largest image, and twice it still fits int32
# Images are painted in blocks of about this many pixels, which stay in the cache.
_BLOCK_PIXELS = 1 << 19

WORDS_PER_SHAPE = (
    8  # kind, colour, three or four for the geometry, the rest unused: two Philox blocks
)


class Shapes(NamedTuple):
    """The shapes of n images in the order in which they are painted, S of them; all int64.

    Attributes:
        circle: ``[n, S]`` bool, True for a circle, False for a rectangle.
        top: ``[n, S]`` first row of the bounding box (rows and columns may lie outside the image
            and are cut).
        bottom: ``[n, S]`` one past the last row.
        left: ``[n, S]`` first column.
        right: ``[n, S]`` one past the last column.
        colours: ``[n, 1 + S, C]`` in 0..255; the first is the canvas.
    """

    circle: Tensor
    top: Tensor
    bottom: Tensor
    left: Tensor
    right: Tensor
    colours: Tensor


def check_images(size: tuple[int, ...], rectangles: int, circles: int) -> tuple[int, int, int]:
    """Return ``size`` as (channels, height, width), or raise InputError.

    The error names the argument that is wrong.
    """
    if not (
        isinstance(size, (tuple, list))
        and len(size) == 3
        and all(type(side) is int for side in size)
    ):
        raise InputError(f"size must be three integers (channels, height, width), got {size!r}")
    channels, height, width = size
    if not 1 <= channels <= 4:
        raise InputError(
            f"size has {channels} channels: shape images have 1 to 4 channels of 8 bits, such as "
            "(3, 224, 224)"
        )
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise InputError(f"size is {height} x {width} pixels: each side must lie in 1..{MAX_SIDE}")
    for name, count in (("rectangles", rectangles), ("circles", circles)):
        if type(count) is not int or not 0 <= count < 1 << 20:
            raise InputError(f"{name} must be an integer of at least 0, got {count!r}")
    return channels, height, width


def shape_bounds(
    height: int, width: int, rectangle_sides: tuple[float, float], circle_radii: tuple[float, float]
) -> list[int]:
    """Return the sizes that shapes may have in an image, from shares of its sides.

    Shares of radii are of the shorter side. Sizes are rounded down.

    Returns:
        Least and greatest height, width and radius, in pixels; both ends are included.

    Raises:
        InputError: Not two shares with 0 <= least <= greatest <= 1.
    """
    for name, shares in (("rectangle_sides", rectangle_sides), ("circle_radii", circle_radii)):
        numbers = isinstance(shares, (tuple, list)) and all(
            type(share) in (int, float) for share in shares
        )
        if not (numbers and len(shares) == 2 and 0 <= shares[0] <= shares[1] <= 1):
            raise InputError(
                f"{name} must be (least, greatest), shares of a side in 0..1 such as (1/8, 1/2), "
                f"got {shares!r}"
            )
    lengths = (
        (height, rectangle_sides, 1),
        (width, rectangle_sides, 1),
        (min(height, width), circle_radii, 0),
    )
    return [
        max(fewest, math.floor(length * share))
        for length, shares, fewest in lengths
        for share in shares
    ]


def resolve_table(
    table: Tensor | None, channels: int, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """Return the ``[channels, 256]`` table of outputs in ``dtype``, checked.

    By default it holds the byte (uint8) or byte / 255.
    """
    if dtype != torch.uint8 and not dtype.is_floating_point:
        raise InputError(
            f"dtype must be a floating-point type, or torch.uint8 for raw bytes, got {dtype}"
        )
    if table is None:
        table = torch.arange(256, dtype=torch.float32, device="cpu")[None].expand(channels, 256)
        table = table if dtype == torch.uint8 else table / 255
    elif dtype == torch.uint8:
        raise InputError(
            "a normalisation table has no meaning for dtype torch.uint8: pass table=None for raw "
            "bytes"
        )
    if table.shape != (channels, 256) or table.dtype != torch.float32:
        raise InputError(
            f"table must be float32 [{channels}, 256], one row a channel, got {table.dtype} "
            f"{list(table.shape)}"
        )
    return table.to(device=device, dtype=dtype).contiguous()


def draw_shapes(
    index: Tensor,
    *,
    size: tuple[int, int, int],
    rectangles: int,
    circles: int,
    seed: int,
    rectangle_sides: tuple[float, float] = RECTANGLE_SIDES,
    circle_radii: tuple[float, float] = CIRCLE_RADII,
) -> Shapes:
    """Draw the canvas colours and the shapes of the images ``index`` (``[n]`` int64).

    See :func:`shape_images`.
    """
    channels, height, width = size
    count = rectangles + circles
    words = random_words(seed, index, STREAMS["shapes"], WORDS_PER_SHAPE * (1 + count)).unflatten(
        1, (1 + count, -1)
    )
    kind, colour, w2, w3, w4, w5 = words.unbind(-1)[:6]
    shifts = torch.arange(0, 8 * channels, 8, device=index.device)
    colours = colour[..., None] >> shifts & 0xFF

    # Random order: of m shapes still to paint, r of them rectangles, the next is a rectangle with
    # probability r / m.
    circle = torch.empty(len(index), count, dtype=torch.bool, device=index.device)
    left_over = torch.full_like(index, rectangles)
    for step in range(count):
        is_rectangle = uniform_integers(kind[:, 1 + step], count - step) < left_over
        left_over = left_over - is_rectangle.long()
        circle[:, step] = ~is_rectangle

    w2, w3, w4, w5 = (word[:, 1:] for word in (w2, w3, w4, w5))
    y, x = uniform_integers(w2, height), uniform_integers(w3, width)

    def between(word: Tensor, least: int, greatest: int) -> Tensor:
        return least + uniform_integers(word, greatest - least + 1)

    bounds = shape_bounds(height, width, rectangle_sides, circle_radii)
    h, w, radius = between(w4, *bounds[:2]), between(w5, *bounds[2:4]), between(w4, *bounds[4:])
    top, left = (
        torch.where(circle, y - radius, y - h // 2),
        torch.where(circle, x - radius, x - w // 2),
    )
    bottom, right = (
        torch.where(circle, y + radius + 1, top + h),
        torch.where(circle, x + radius + 1, left + w),
    )
    return Shapes(circle, top, bottom, left, right, colours)


def paint(shapes: Shapes, height: int, width: int) -> Tensor:
    """Return the number of the shape on top at each pixel: ``[n, height, width]`` int64.

    It is 0 for the canvas, s for the s-th shape.
    """
    circle, top, bottom, left, right = (t.int()[..., None] for t in shapes[:5])
    n, count = shapes.circle.shape
    circle, radius = circle.bool(), (bottom - top) // 2

    # A pixel is inside where y + x <= limit. Circle: squared distances and radius**2.
    # Rectangle: 0 between the bounds, _OUTSIDE elsewhere, and 0. The comparison is y <= limit - x,
    # to save an addition.
    def distance(length: int, low: Tensor, high: Tensor) -> Tensor:
        position = torch.arange(length, dtype=torch.int32, device=low.device)
        inside = (position >= low) & (position < high)
        return torch.where(
            circle, (position - low - radius).square(), torch.where(inside, 0, _OUTSIDE)
        )

    y = distance(height, top, bottom)
    limit_x = torch.where(circle, radius.square(), 0) - distance(width, left, right)
    top_shape = torch.zeros(
        n, height, width, dtype=torch.uint8 if count < 256 else torch.int32, device=circle.device
    )
    for step in range(count):
        inside = y[:, step, :, None] <= limit_x[:, step, None, :]
        torch.maximum(top_shape, inside.to(top_shape.dtype).mul_(step + 1), out=top_shape)
    return top_shape.long()


def shape_images(
    start: int, stop: int, *, device: torch.device | str | None = None, **options: Any
) -> Tensor:  # [stop - start, C, H, W]
    """Return the images ``start .. stop-1`` of overlapping random shapes.

    Image i is a pure function of (seed, i).

    The canvas has one uniform random colour; then ``rectangles`` rectangles and ``circles`` circles
    are painted over it in uniformly random order, each in a uniform random 8-bit colour. With all
    integers uniform in their ranges:

    - a rectangle has height in ``[H // 8, H // 2]`` and width in ``[W // 8, W // 2]`` (at least 1),
      unless ``rectangle_sides`` says otherwise;
    - a circle has radius r in ``[min(H, W) // 16, min(H, W) // 4]``, unless ``circle_radii`` does,
      and covers ``dy**2 + dx**2 <= r**2``;
    - centres are uniform over the pixels, and what lies outside the image is cut off.

    The paper (Sections 3.6 and 4.1, Appendix A.3) fixes the numbers of shapes, the random order and
    that sizes, positions and colours are random; the ranges are ours.

    Args:
        start: index of the first image, from 0.
        stop: one past the last, at most ``2**64``.
        device: where to make the images.
        **options: those of :func:`shape_images_at`.

    Returns:
        ``[stop - start, C, H, W]``, the same bits on every device, in every chunk and on every
        backend.

    Raises:
        InputError: an argument is out of range; the message names it.
    """
    return shape_images_at(indices(start, stop, device), **options)


def shape_images_at(
    index: Tensor,  # [n]
    *,
    size: tuple[int, int, int] = (3, 224, 224),
    rectangles: int = 5,
    circles: int = 5,
    seed: int = 0,
    table: Tensor | None = None,  # [C, 256]
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    rectangle_sides: tuple[float, float] = RECTANGLE_SIDES,
    circle_radii: tuple[float, float] = CIRCLE_RADII,
) -> Tensor:  # [n, C, H, W]
    """The images of `shape_images` with the numbers ``index``, on its device and in its order.

    Args:
        index: ``[n]`` int64 with the same 64 bits as the numbers of the images.
        size: (C, H, W); C in 1..4, sides in 1..16384 pixels.
        rectangles: rectangles an image.
        circles: circles an image.
        seed: integer in ``[0, 2**64)``.
        table: float32 ``[C, 256]``, the output for each byte of each channel (a normalisation).
            None: byte / 255, or the byte itself for ``dtype=torch.uint8``.
        dtype: Dtype of the output; table entries are rounded to it, nothing else is.
        channels_last: give the output ``torch.channels_last`` memory format.
        rectangle_sides: least and greatest height of a rectangle as shares of H, width of W;
            rounded down, at least 1.
        circle_radii: least and greatest radius of a circle as shares of the shorter side; rounded
            down.

    Returns:
        ``[n, C, H, W]`` of ``dtype``.

    Raises:
        InputError: an argument is out of range, or index is no ``[n]`` int64 with n of at least 1.
    """
    index, seed = check_index(index), check_seed(seed)
    device = index.device
    size = channels, height, width = check_images(size, rectangles, circles)
    table = resolve_table(table, channels, dtype, device)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty(len(index), *size, dtype=dtype, device=device, memory_format=memory_format)
    flat = out.permute(0, 2, 3, 1) if channels_last else out
    block = max(1, _BLOCK_PIXELS // (height * width))
    for part, numbers in zip(flat.split(block), index.split(block)):
        shapes = draw_shapes(
            numbers,
            size=size,
            rectangles=rectangles,
            circles=circles,
            seed=seed,
            rectangle_sides=rectangle_sides,
            circle_radii=circle_radii,
        )
        values = table[torch.arange(channels, device=device), shapes.colours]  # [n, 1 + S, C]
        pixels = paint(shapes, height, width).flatten(1)
        if channels_last:
            torch.gather(
                values, 1, pixels[:, :, None].expand(-1, -1, channels), out=part.flatten(1, 2)
            )
        else:
            values = values.transpose(1, 2).contiguous()
            torch.gather(
                values, 2, pixels[:, None, :].expand(-1, channels, -1), out=part.flatten(2)
            )
    return out


def shape_images_from(
    first: Tensor,  # [1]
    n: int,
    **options: Any,
) -> Tensor:  # [n, C, H, W]
    """Return `shape_images` ``start .. start + n - 1`` on the device of ``first``.

    ``first`` holds the start (int64, the same 64 bits).
    """
    start = int(first) % (1 << 64)
    return shape_images(start, start + n, device=first.device, **options)
