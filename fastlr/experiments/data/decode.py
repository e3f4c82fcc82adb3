"""Decode the images of one class into the store."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

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
MAX_FILE_MB = 512  # of one file of the source, unpacked: 700 images of 3 x 480 x 480 in a .npy file

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


class Files(NamedTuple):
    """The files under a folder, or in a zip archive."""

    root: str
    zipped: bool

    def open(self, name: str) -> BinaryIO:
        """Open a file."""
        if self.zipped:
            return open_zip(self.root).open(name)  # type: ignore[return-value]
        return open(os.path.join(self.root, name), "rb")

    def size_within(self, limit_mb: float, name: str) -> int:
        """Return a file's size in bytes, for a member of an archive as the archive declares it.

        Raises:
            InputError: The size is above ``limit_mb``.
        """
        if self.zipped:
            size, unpacked = open_zip(self.root).getinfo(name).file_size, " unpacked"
        else:
            size, unpacked = os.stat(os.path.join(self.root, name)).st_size, ""
        if size > limit_mb * 1e6:
            raise InputError(
                f"{name} of {self.root} has {size / 1e6:,.1f} MB{unpacked}, and the limit is "
                f"{limit_mb:g} MB: give a greater --max-file-mb if it is to be read"
            )
        return size

    def read(self, name: str, limit_mb: float) -> bytes:
        """Return the bytes of a file.

        No more than the declared size is unpacked, so an archive that declares less than it holds
        takes no memory either.

        Raises:
            zipfile.BadZipFile: The archive's checksum of this file fails (the file is corrupt, or
                longer than declared).
            InputError: It is larger than the limit, not there or cannot be read (the disk, the
                network or a permission; not this image).
        """
        try:
            size = self.size_within(limit_mb, name)
            with self.open(name) as file:
                return file.read(size)
        except (zipfile.BadZipFile, zlib.error, EOFError):
            raise zipfile.BadZipFile("its data in the zip archive is damaged") from None
        except (OSError, KeyError, RuntimeError, NotImplementedError) as error:
            raise InputError(f"cannot read {name} of {self.root}: {error}") from error


def open_zip(path: str) -> zipfile.ZipFile:
    """Return the opened archive, opened anew only when the file has changed.

    It stays open for the next image.
    """
    status = os.stat(path)
    return _open_zip(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)
def _open_zip(path: str, changed: int, size: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def _read(job: Job, name: str) -> bytes:
    data: bytes = job["place"].read(name, job["max_file_mb"])
    return data


def npy_images(job: Job, name: str) -> np.ndarray:
    """Return the ``[n, 3, H, W]`` uint8 array of a class.

    It is checked against what its header said when it was listed.
    """
    root = job["place"].root
    try:
        data = io.BytesIO(_read(job, name))
        array = np.load(data, allow_pickle=False)
    except InputError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{name} of {root} is no whole .npy file: {error}") from error
    if array.dtype != np.uint8 or list(array.shape) != job["shape"]:
        raise InputError(
            f"{name} of {root} is {array.dtype} {list(array.shape)}, and was uint8 "
            f"{job['shape']} when listed"
        )
    return array


def class_images(job: Job) -> Iterator[tuple[str, str, np.ndarray | str]]:
    """Yield every image of a class: its split, its name, and its pixels.

    In place of the pixels of a corrupt image comes the reason.
    """
    size, resize = job["size"], job["resize"]
    if job["npy"] is not None:
        array = npy_images(job, job["npy"])
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
            ``resize``, ``place`` and ``max_file_mb`` (the source), ``train`` and ``test`` (names of
            files), or ``npy``, ``npy_train`` and ``shape``.

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
