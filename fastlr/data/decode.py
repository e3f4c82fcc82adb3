"""Decode the images of one class and write them into the store: the work of one process of ``fastlr data prepare``.

This file imports nothing of fastlr, because it also runs as a script of its own: a worker process then starts in a
tenth of a second and holds no copy of torch. The script reads jobs from stdin, one JSON object a line, and answers on
stdout with lines ``{"done": images}`` on the way and one ``{"result": ...}`` or ``{"error": [kind, text]}`` a job. It
ends when stdin does, and also, between two images, when the process that started it is no longer there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

CHANNELS = 3
SPLITS = ("train", "test")
RULE = (
    "RGB (Pillow's convert); shorter side resized to the size, bilinear with antialiasing, then centre crop (as "
    "torchvision's Resize and CenterCrop on PIL images); an image that has the size already is copied as it is"
)
_BUFFER = 4 << 20  # bytes written at a time
_EVERY = 32  # images between two reports


class SourceError(Exception):
    """The source cannot be read or is not what it was when it was listed; the message names the file."""


def to_pixels(image: Image.Image, size: int) -> np.ndarray:
    """Return ``image`` as uint8 ``[size, size, 3]`` by :data:`RULE`."""
    if image.mode.startswith("I;16"):  # Pillow's convert would clip 16-bit grey at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} (32 bits) have no fixed range")
    image = image.convert("RGB")
    width, height = image.size
    if (width, height) != (size, size):
        if min(width, height) != size:
            long = int(size * max(width, height) / min(width, height))
            width, height = (size, long) if width <= height else (long, size)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = int(round((width - size) / 2.0)), int(round((height - size) / 2.0))
        image = image.crop((left, top, left + size, top + size))
    return np.asarray(image)


def decode(data: bytes, size: int) -> np.ndarray:
    """Decode the bytes of an image file to uint8 ``[size, size, 3]``; any exception means that the file is corrupt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata, palettes with transparency, very large images
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return to_pixels(image, size)


def read_bytes(root: str, zipped: bool, name: str) -> bytes:
    """Return the bytes of the file ``name`` under the folder or in the zip archive ``root``.

    Raises:
        zipfile.BadZipFile: The archive's checksum of this file fails (the file is corrupt).
        SourceError: It is not there or cannot be read (the disk, the network or a permission; not this image).
    """
    try:
        if not zipped:
            with open(os.path.join(root, name), "rb") as file:
                return file.read()
        return open_zip(root).read(name)
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise zipfile.BadZipFile("its data in the zip archive is damaged") from None
    except (OSError, KeyError, RuntimeError, NotImplementedError) as error:
        raise SourceError(f"cannot read {name} of {root}: {error}") from error


def open_zip(path: str) -> zipfile.ZipFile:
    """Return the opened archive; it stays open for the next image, and is opened again when the file has changed."""
    status = os.stat(path)
    return _open_zip(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2)
def _open_zip(path: str, changed: int, size: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(path)


def npy_images(job: dict[str, Any], name: str) -> np.ndarray:
    """Return the ``[n, 3, H, W]`` uint8 array of a class, checked against what its header said when it was listed."""
    try:
        array = np.load(io.BytesIO(read_bytes(job["root"], job["zipped"], name)), allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise SourceError(f"{name} of {job['root']} is no whole .npy file: {error}") from error
    if array.dtype != np.uint8 or list(array.shape) != job["shape"]:
        raise SourceError(
            f"{name} of {job['root']} is {array.dtype} {list(array.shape)}, and was uint8 {job['shape']} when listed"
        )
    return array


def class_images(job: dict[str, Any]) -> Iterator[tuple[str, str, np.ndarray | str]]:
    """Yield (split, name of the image, pixels or the reason why it is corrupt) for every image of a class."""
    size = job["size"]
    if job["npy"] is not None:
        array = npy_images(job, job["npy"])
        for row, image in enumerate(array.transpose(0, 2, 3, 1)):
            split = SPLITS[row >= job["npy_train"]]
            same = image.shape[:2] == (size, size)
            yield split, f"{job['npy']}[{row}]", image if same else to_pixels(Image.fromarray(image.copy()), size)
        return
    for split in SPLITS:
        for name in job[split]:
            try:
                pixels: np.ndarray | str = decode(read_bytes(job["root"], job["zipped"], name), size)
            except (SourceError, MemoryError):
                raise
            except Exception as error:  # a decoder may raise anything on a damaged file
                text = " ".join(str(error).split())
                text = text if "BytesIO" not in text else "it is no image, or of an unknown kind"
                pixels = f"{type(error).__name__}: {text}"
            yield split, name, pixels


def write_class(job: dict[str, Any], report: Callable[[int], None] = lambda images: None) -> dict[str, Any]:
    """Write the images of one class into their block of the store, the training images first, and flush it to disk.

    The same job gives the same bytes whenever it is done, so that a block that was interrupted is done again in place.
    Rows that corrupt images leave free are at the end of the block, and are zero.

    Args:
        job: ``out`` (the file of the store), ``first`` and ``rows`` (the block), ``size``, ``root`` and ``zipped``
            (the source), ``train`` and ``test`` (names of files), or ``npy``, ``npy_train`` and ``shape``.
        report: Called with the number of images since the last call.

    Returns:
        ``{"train": images, "test": images, "left_out": [{"file", "split", "reason"}], "sha256": of the whole block}``.

    Raises:
        SourceError: A file cannot be read.
        OSError: The store cannot be written.
    """
    row_bytes = job["size"] ** 2 * CHANNELS
    counts, left_out = dict.fromkeys(SPLITS, 0), []
    digest, pending, unreported, written = hashlib.sha256(), bytearray(), 0, 0
    with open(job["out"], "r+b", buffering=0) as file:
        file.seek(job["first"] * row_bytes)

        def flush() -> int:
            digest.update(pending)
            view = memoryview(pending)
            while view:
                view = view[file.write(view) :]
            view.release()
            size = len(pending)
            pending.clear()
            return size

        for split, name, pixels in class_images(job):
            if isinstance(pixels, str):
                left_out.append({"file": name, "split": split, "reason": pixels})
            else:
                pending += pixels.tobytes()
                counts[split] += 1
                if len(pending) >= _BUFFER:
                    written += flush()
            unreported += 1
            if unreported == _EVERY:
                report(unreported)
                unreported = 0
        free = job["rows"] * row_bytes - written - len(pending)
        while free:
            part = min(free, _BUFFER)
            pending += bytes(part)
            free -= part
            written += flush()
        flush()
        os.fsync(file.fileno())
    report(unreported)
    return {**counts, "left_out": left_out, "sha256": digest.hexdigest()}


def block_digest(path: str, first: int, rows: int, row_bytes: int) -> str:
    """Return the SHA-256 of a block of rows as it is on disk ("" where the file is too short)."""
    digest, left = hashlib.sha256(), rows * row_bytes
    buffer = memoryview(bytearray(min(_BUFFER, max(left, 1))))
    with open(path, "rb", buffering=0) as file:
        file.seek(first * row_bytes)
        while left:
            got = file.readinto(buffer[: min(left, len(buffer))])
            if not got:
                return ""
            digest.update(buffer[:got])
            left -= got
    return digest.hexdigest()


def serve() -> None:
    """Do the jobs that come on stdin, and answer on stdout, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us when the user interrupts it
    parent = os.getppid()

    def answer(message: dict[str, Any]) -> None:
        try:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            os._exit(1)

    def report(images: int) -> None:
        if os.getppid() != parent:  # it was killed: what is written from here on would be no use to anybody
            os._exit(1)
        answer({"done": images})

    for line in sys.stdin:
        job = json.loads(line)
        try:
            if "check" in job:
                answer({"result": block_digest(*job["check"])})
            else:
                answer({"result": write_class(job, report)})
        except SourceError as error:
            answer({"error": ["source", str(error)]})
        except OSError as error:
            answer({"error": ["store", str(error), error.errno]})
        except MemoryError:
            answer({"error": ["memory", "no memory left to decode an image"]})


if __name__ == "__main__":
    serve()
