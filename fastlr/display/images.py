"""Contact sheets: many images in one PNG, to see what a network is measured on."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from fastlr.errors import InputError
from fastlr.files import write_errors


def contact_sheet(
    images: Tensor, path: str | Path, columns: int = 8, gap: int = 4, background: int = 255
) -> Path:
    """Save images side by side as a PNG file, row by row, as `tiled` arranges them.

    Args:
        images: as for `tiled`, like ``columns``, ``gap`` and ``background``.
        path: the file to write; missing folders are made.
        columns: images a row, at most.
        gap: pixels between images and around them.
        background: grey level of the gaps, 0..255.

    Returns:
        The path. The same images give the same bytes (for one version of Pillow).

    Raises:
        InputError: as `tiled`, or an unwritable file.
    """
    sheet, path = tiled(images, columns, gap, background), Path(path)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path, "PNG")
    return path


def tiled(images: Tensor, columns: int = 8, gap: int = 4, background: int = 255) -> Image.Image:
    """Return a picture of images side by side, row by row.

    Args:
        images: ``[n, C, H, W]``, C = 1 (grey) or 3 (RGB); uint8, or floating-point in [0, 1] (not
            normalised).
        columns: images a row, at most.
        gap: pixels between images and around them.
        background: grey level of the gaps, 0..255.

    Raises:
        InputError: wrong shape, no images, values outside [0, 1], or an argument out of range.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.numel() == 0:
        raise InputError(
            f"images must be [n, C, H, W] with C = 1 or 3 and n >= 1, got {list(images.shape)}"
        )
    if columns < 1 or gap < 0 or not 0 <= background <= 255:
        raise InputError(
            f"need columns >= 1, gap >= 0 and background in 0..255, got {columns}, {gap} and "
            f"{background}"
        )
    images = images.detach().cpu()
    if images.is_floating_point():
        if not ((images >= 0) & (images <= 1)).all():
            raise InputError(
                "images must lie in [0, 1]: pass the raw images, not the normalised ones"
            )
        images = (images.double() * 255).round().to(torch.uint8)
    elif images.dtype != torch.uint8:
        raise InputError(f"images must be uint8 or floating-point in [0, 1], got {images.dtype}")
    n, channels, height, width = images.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    size = (rows * (height + gap) + gap, columns * (width + gap) + gap, channels)
    sheet = torch.full(size, background, dtype=torch.uint8)
    for i, image in enumerate(images.movedim(1, -1)):
        y, x = gap + i // columns * (height + gap), gap + i % columns * (width + gap)
        sheet[y : y + height, x : x + width] = image
    return Image.fromarray(sheet.squeeze(2).numpy())
