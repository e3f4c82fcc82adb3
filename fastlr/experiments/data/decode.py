"""Decode the images of one class into the store."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fastlr.errors import InputError

CHANNELS = 3
SPLITS = ("train", "test")
RULES = {  # how an image is brought to the size of a store
    "squash": "RGB (Pillow's convert); both sides resized to the size whatever their ratio, "
    "bilinear with antialiasing (as "
    "torchvision's Resize to a pair on PIL images); an image that has the size already is copied "
    "as it is",
    "crop": "RGB (Pillow's convert); shorter side resized to the size, bilinear with "
    "antialiasing, then centre crop (as "
    "torchvision's Resize and CenterCrop on PIL images); an image that has the size already is "
    "copied as it is",
}
_BUFFER = 4 << 20  # bytes read or written at a time

Job = dict[str, Any]


def to_pixels(image: Image.Image, size: int, resize: str) -> np.ndarray:
    """Return ``image`` as uint8 ``[size, size, 3]`` by one of :data:`RULES`."""
    from torchvision.transforms import functional

    if image.mode.startswith("I;16"):  # Pillow's convert would clip 16-bit grey at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} (32 bits) have no fixed range")
    sides = [size, size] if resize == "squash" else [size]
    resized: Any = functional.resize(image.convert("RGB"), sides)
    return np.asarray(functional.center_crop(resized, [size, size]))


def decode(data: bytes, size: int, resize: str) -> np.ndarray:
    """Decode the bytes of an image file to uint8 ``[size, size, 3]``.

    Any exception means that the file is corrupt.
    """
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return to_pixels(image, size, resize)


def _read(job: Job, name: str) -> bytes:
    """Return the bytes of a file of the source.

    Raises:
        InputError: It cannot be read. That says nothing about the image.
    """
    try:
        return Path(job["source"], name).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {name} of {job['source']}: {error}") from error


def class_images(job: Job) -> Iterator[tuple[str, str, np.ndarray | str]]:
    """Yield every image of a class: its split, its name, and its pixels.

    In place of the pixels of a corrupt image comes the reason.
    """
    size, resize = job["size"], job["resize"]
    if job["npy"] is not None:
        array = np.load(io.BytesIO(_read(job, job["npy"])))
        for row, image in enumerate(array.transpose(0, 2, 3, 1)):
            split = "train" if row < job["npy_train"] else "test"
            same = image.shape[:2] == (size, size)
            pixels = image if same else to_pixels(Image.fromarray(image.copy()), size, resize)
            yield split, f"{job['npy']}[{row}]", pixels
        return
    for split in SPLITS:
        for name in job[split]:
            try:
                found: np.ndarray | str = decode(_read(job, name), size, resize)
            except (InputError, MemoryError):
                raise
            except Exception as error:  # a decoder may raise anything on a damaged file
                text = " ".join(str(error).split())
                text = text if "BytesIO" not in text else "it is no image, or of an unknown kind"
                found = f"{type(error).__name__}: {text}"
            yield split, name, found


def write_class(job: Job) -> dict[str, Any]:
    """Write the images of one class into their block of the store, and flush it to disk.

    The training images come first.

    The same job gives the same bytes whenever it is done, so that a block that was interrupted is
    done again in place. Rows that corrupt images leave free are at the end of the block, and are
    zero.

    Args:
        job: ``out`` (the file of the store), ``first`` and ``rows`` (the block), ``size``,
            ``resize``, ``source`` (its folder), ``train`` and ``test`` (names of files), or ``npy``
            and ``npy_train``.

    Returns:
        ``{"train": images, "test": images, "left_out": [{"file", "split", "reason"}], "sha256": of
        the whole block}``.

    Raises:
        InputError: A file cannot be read.
        OSError: The store cannot be written.
    """
    row_bytes = job["size"] ** 2 * CHANNELS
    counts, left_out = dict.fromkeys(SPLITS, 0), []
    digest = hashlib.sha256()
    with open(job["out"], "r+b", buffering=_BUFFER) as file:
        file.seek(job["first"] * row_bytes)

        def write(data: bytes) -> None:
            file.write(data)
            digest.update(data)

        for split, name, pixels in class_images(job):
            if isinstance(pixels, str):
                left_out.append({"file": name, "split": split, "reason": pixels})
            else:
                write(pixels.tobytes())
                counts[split] += 1
        for _ in range(job["rows"] - sum(counts.values())):
            write(bytes(row_bytes))
        file.flush()
        os.fsync(file.fileno())
    return {**counts, "left_out": left_out, "sha256": digest.hexdigest()}


def block_digest(path: str, first: int, rows: int, row_bytes: int) -> str:
    """Return the SHA-256 of a block of rows as it is on disk ("" where the file is too short)."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=_BUFFER) as file:
        file.seek(first * row_bytes)
        for _ in range(rows):
            row = file.read(row_bytes)
            if len(row) < row_bytes:
                return ""
            digest.update(row)
    return digest.hexdigest()
