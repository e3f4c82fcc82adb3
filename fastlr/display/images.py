"""Contact sheets: many images in one picture, to see what a network is measured on."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

from fastlr.errors import InputError


def tiled(images: Tensor, columns: int = 8, gap: int = 4) -> Image.Image:
    """Return a picture of images side by side, row by row, on white.

    Args:
        images: ``[n, C, H, W]``, C = 1 (grey) or 3 (RGB); uint8, or floating-point in [0, 1] (not
            normalised).
        columns: images a row, at most.
        gap: pixels between images and around them.

    Raises:
        InputError: wrong shape, no images, or values outside [0, 1].
    """
    from torchvision.utils import make_grid

    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.numel() == 0:
        raise InputError(
            f"images must be [n, C, H, W] with C = 1 or 3 and n >= 1, got {list(images.shape)}"
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
    grid = make_grid(images, columns, gap, pad_value=255)[: images.shape[1]]
    return Image.fromarray(grid.movedim(0, -1).squeeze(2).numpy())
