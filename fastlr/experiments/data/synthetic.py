"""Make images by class with the counter-based generator, without a download.

They are data for the demo and the tests.

A class is a random texture. Each image shows it shifted cyclically by a random amount, at a random
contrast, over another random texture that belongs to no class, with noise on every pixel. The mean
of a texture is grey (within a grey level in each channel), so averaged over the shifts every pixel
has the same mean in every class and a linear classifier is near chance, while a small convolutional
network learns two classes from a few hundred images. Integer arithmetic throughout: the same bytes
on every machine.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.experiments.data.decode import CHANNELS
from fastlr.experiments.data.store import IMAGES, INDEX, ImageStore, build_index
from fastlr.files import replace_file
from fastlr.ops.philox import STREAMS, check_seed, indices, random_words, uniform_integers

NOISE = 64  # grey levels: range of the uniform noise on each pixel
GRID = 6  # cells of a texture along a side: bumps of a sixth of the image
# Image i of class c is drawn at index (c + 1) * 2**32 + i, the texture of class c at index c.
_CLASS_BITS = 32


def synthetic_store(
    path: str | Path | None = None,
    classes: int = 10,
    *,
    size: int = 32,
    train: int = 200,
    test: int = 50,
    seed: int = 0,
) -> ImageStore:
    """Make a store of synthetic images.

    Args:
        path: A new folder to write it to; None: in memory.
        classes: How many; named ``texture-000`` and so on. A class is the same whatever the number
            of classes.
        size: Height and width, at least 8.
        train: Training images a class.
        test: Test images a class; image i of a class is the same whatever the numbers.
        seed: In ``[0, 2**64)``.

    Raises:
        InputError: An argument is out of range, or the folder holds something.
    """
    check_seed(seed)
    for name, value, low, high in (
        ("classes", classes, 2, 1 << 20),
        ("size", size, 8, 4096),
        ("train", train, 1, 1 << 24),
        ("test", test, 1, 1 << 24),
    ):
        if not low <= value <= high:
            raise InputError(f"{name} must lie in {low}..{high}, got {value}")
    blocks, parts = [], []
    for c in range(classes):
        pixels = (
            texture_images(c, 0, train + test, size=size, seed=seed)
            .permute(0, 2, 3, 1)
            .contiguous()
        )
        digest = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
        counts = {"rows": train + test, "train": train, "test": test}
        blocks.append({"name": f"texture-{c:03d}", **counts, "sha256": digest, "left_out": []})
        parts.append(pixels)
    plan: dict[str, Any] = {
        "source": "synthetic textures",
        "kind": "synthetic",
        "size": size,
        "seed": seed,
    }
    from fastlr import __version__

    index = build_index({**plan, "noise": NOISE}, blocks, {"fastlr": __version__, "decoders": []})
    data = torch.cat(parts).numpy()
    if path is None:
        return ImageStore(index, pixels=data)
    folder = Path(path).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already: choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    data.tofile(folder / IMAGES)
    replace_file(folder / INDEX, json.dumps(index, indent=1) + "\n")
    return ImageStore.open(folder)


def texture_images(
    texture_class: int, start: int, stop: int, *, size: int = 32, seed: int = 0
) -> Tensor:
    """Return the images ``start .. stop-1`` of a class, uint8 ``[n, 3, size, size]``.

    See :func:`synthetic_store`.
    """
    cells, stream = CHANNELS * GRID * GRID, STREAMS["textures"]
    prototype = _texture(random_words(seed, torch.tensor([texture_class]), stream, cells), size)[0]
    origin = (texture_class + 1) << _CLASS_BITS
    index = indices(origin + start, origin + stop)
    words = random_words(seed, index, stream, 3 + cells)
    dy, dx = uniform_integers(words[:, 0], size), uniform_integers(words[:, 1], size)
    contrast = 96 + uniform_integers(words[:, 2], 97)  # of the texture, in 256ths: 0.375 to 0.75
    y = (torch.arange(size) + dy[:, None]) % size
    x = (torch.arange(size) + dx[:, None]) % size
    shifted = prototype[:, y[:, :, None], x[:, None, :]].transpose(0, 1)
    out = (shifted - 128) * contrast[:, None, None, None] >> 8
    out += (_texture(words[:, 3:], size) - 128) * 112 >> 8
    pixels = CHANNELS * size * size
    grain = random_words(seed, index, stream, -(-pixels // 4), first=64 * cells)
    grain = torch.stack([grain >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(1)[
        :, :pixels
    ]
    out += (grain * NOISE >> 8).view_as(out) - NOISE // 2
    return (out + 128).clamp(0, 255).to(torch.uint8)


def _texture(
    words: Tensor,  # [n, 3 * GRID**2] int64
    size: int,
) -> Tensor:
    """Return cyclic textures ``[n, 3, size, size]`` in 0..255.

    They are grids of the words, interpolated bilinearly.

    In 256ths of a cell, in integers. The mean of each is then moved to 127 or 128.
    """
    grid = (words & 0xFF).unflatten(1, (CHANNELS, GRID, GRID))
    place = torch.arange(size) * GRID * 256 // size
    cell, fraction = place >> 8, place & 0xFF
    following = (cell + 1) % GRID
    rows = grid[:, :, cell] * (256 - fraction)[:, None] + grid[:, :, following] * fraction[:, None]
    texture = (rows[..., cell] * (256 - fraction) + rows[..., following] * fraction) >> 16
    mean = texture.sum(dim=(2, 3), keepdim=True) // (size * size)
    return (texture - mean + 128).clamp(0, 255)
