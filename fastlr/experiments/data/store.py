"""The image store: one file of uint8 pixels ``[N, H, W, 3]`` and a JSON index.

``images.u8`` is nothing but the pixels, so it can be mapped into memory; ``index.json`` says which
rows are whose. Each class has one block of rows: its training images, its test images, then zero
rows in place of images that were left out. A task of two classes is thus two contiguous reads a
split.

The pixels are channels last on disk: decoders produce that order, a batch is then a gather of whole
rows, and convolutions on GPUs want channels_last activations, so nothing is ever transposed after
the store was made. Tensors are handed out as ``[n, 3, H, W]`` with channels_last strides.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastlr.errors import InputError
from fastlr.experiments.data.decode import CHANNELS, SPLITS, block_digest

FORMAT, VERSION = "fastlr image store", 1
IMAGES, INDEX, JOURNAL = "images.u8", "index.json", "blocks.jsonl"


def build_index(
    plan: dict[str, Any], blocks: Sequence[dict[str, Any]], versions: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of ``index.json``.

    Args:
        plan: What the store was made of; needs ``size``.
        blocks: One a class, in order: name, rows, train, test (numbers of images), sha256,
            left_out.
        versions: Versions of the software that decoded.
    """
    first, classes = 0, []
    for block in blocks:
        middle = first + block["train"]
        ranges = {"train": [first, middle], "test": [middle, middle + block["test"]]}
        kept = {key: block[key] for key in ("sha256", "left_out")}
        classes.append(
            {"name": block["name"], "first": first, "rows": block["rows"], **ranges, **kept}
        )
        first += block["rows"]
    size = plan["size"]
    images = dict.fromkeys((*SPLITS, "left_out"), 0)
    for block in blocks:
        images["train"] += block["train"]
        images["test"] += block["test"]
        images["left_out"] += len(block["left_out"])
    content = [
        [size, first],
        *([entry["name"], entry["train"], entry["test"], entry["sha256"]] for entry in classes),
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": "uint8",
        "shape": [first, size, size, CHANNELS],
        "images": images,
        "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
        "plan": plan,
        "versions": versions,
        "classes": classes,
    }


def read_index(folder: Path) -> dict[str, Any]:
    """Read and check ``index.json``.

    Raises:
        InputError: There is no finished store, or its index is damaged or of another version.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (folder / JOURNAL).exists():
            raise InputError(
                f"{folder} is an unfinished store: run fastlr data prepare again to finish it"
            ) from None
        what = "holds no image store" if folder.is_dir() else "does not exist"
        raise InputError(
            f"{folder} {what}: make one by fastlr data prepare SOURCE {folder}"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {path}: {error}; prepare the store anew in another folder"
        ) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(f"{path} is not the index of an image store of fastlr")
    if index.get("version") != VERSION:
        raise InputError(
            f"{folder} is a store of version {index.get('version')}, this fastlr reads version "
            f"{VERSION}: use the fastlr that made it, or prepare it anew in another folder"
        )
    return index


class ImageStore:
    """Images by class and split.

    Open a store by :meth:`open`, or make one in memory by :func:`synthetic_store`.

    Attributes:
        index: The content of ``index.json``: source, rule of resizing, versions, what was left out
            and why.
        path: Path of the folder; None in memory.
        classes: Names, in order.
        size: Height and width of the images.
        digest: SHA-256 that identifies the content: the classes, their ranges and their checksums.
    """

    def __init__(
        self, index: dict[str, Any], path: Path | None = None, pixels: np.ndarray | None = None
    ) -> None:
        self.index, self.path, self._pixels = index, path, pixels
        self.classes: list[str] = [entry["name"] for entry in index["classes"]]
        self.size: int = index["shape"][1]
        self.digest: str = index["sha256"]
        self._verified: set[int] = set()

    @classmethod
    def open(cls, path: str | Path) -> ImageStore:
        """Open a finished store, and check its index and its size.

        A class's checksum is checked when the class is first loaded.

        Raises:
            InputError: It is not there, unfinished, damaged, or of another version.
        """
        folder = Path(os.path.abspath(path))
        index = read_index(folder)
        wanted = int(np.prod(index["shape"], dtype=np.int64))
        try:
            size = (folder / IMAGES).stat().st_size
        except OSError as error:
            raise InputError(
                f"cannot read {folder / IMAGES}: {error.strerror}; {_REPAIR}"
            ) from error
        if size != wanted:
            raise InputError(f"{folder / IMAGES} has {size} bytes in place of {wanted}: {_REPAIR}")
        return cls(index, folder)

    @property
    def resize(self) -> str | None:
        """How images were brought to the size: ``squash`` or ``crop``.

        None where there was nothing to resize.
        """
        plan = self.index["plan"]
        return plan.get("resize", "crop") if "rule" in plan else None

    @property
    def images(self) -> np.ndarray:
        """All rows, uint8 ``[N, H, W, 3]``: the memory map (read-only)."""
        if self._pixels is None:
            assert self.path is not None
            self._pixels = np.memmap(
                self.path / IMAGES, dtype=np.uint8, mode="r", shape=tuple(self.index["shape"])
            )
        return self._pixels

    def range(self, position: int, split: str) -> tuple[int, int]:
        """Return the first row, and one past the last, of a class's images of a split.

        The split is "train" or "test".

        Raises:
            InputError: There is no such class or split.
        """
        if split not in SPLITS:
            raise InputError(f"split {split!r}: choose train or test")
        if not 0 <= position < len(self.classes):
            raise InputError(
                f"{self} has classes 0..{len(self.classes) - 1}, there is no class {position}"
            )
        start, stop = self.index["classes"][position][split]
        return start, stop

    def rows(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of all images of a split, and the index of each one's class; checked.

        The rows are class after class.

        Raises:
            InputError: The images of a class are not what was written.
        """
        spans = [self.range(i, split) for i in range(len(self.classes))]
        for i in range(len(spans)):
            self.verify(i)
        lengths = [stop - start for start, stop in spans]
        return np.concatenate([np.arange(*span) for span in spans]), np.repeat(
            np.arange(len(spans)), lengths
        )

    def load(
        self,
        classes: Sequence[int],
        split: str = "train",
        *,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read all images of some classes.

        Args:
            classes: Their indices.
            split: "train" or "test".
            device: Where the tensors are wanted (None: the CPU).

        Returns:
            images: uint8 ``[n, 3, H, W]`` with channels_last strides, class after class.
            labels: int64 ``[n]``, the position in ``classes``: 0 for the first.

        Raises:
            InputError: An unknown class or split, no class, or a store that is no longer what was
                written.
        """
        if not len(classes):
            raise InputError("give at least one class")
        ranges = [self.range(position, split) for position in classes]
        for position in classes:
            self.verify(position)
        counts = [stop - start for start, stop in ranges]
        pixels = torch.empty(sum(counts), self.size, self.size, CHANNELS, dtype=torch.uint8)
        for (start, _), rows in zip(ranges, pixels.split(counts)):
            self._read(start, rows.numpy())
        labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        device = device or "cpu"
        return pixels.to(device).permute(0, 3, 1, 2), labels.to(device)

    def _read(self, start: int, out: np.ndarray) -> None:
        """Fill ``out`` with rows of the store from ``start`` on.

        The file is read, not mapped: a map of a file that has become shorter would end the process.
        """
        if self.path is None:
            np.copyto(out, self.images[start : start + len(out)])
            return
        try:
            with open(self.path / IMAGES, "rb") as file:
                file.seek(start * self.size**2 * CHANNELS)
                if file.readinto(out.reshape(-1).data) < out.size:
                    raise InputError(f"{self.path / IMAGES} has become shorter: {_REPAIR}")
        except OSError as error:
            raise InputError(
                f"cannot read {self.path / IMAGES}: {error.strerror or error}"
            ) from error

    def verify(self, position: int) -> None:
        """Check the images of a class against their checksum, the first time that it is asked for.

        Raises:
            InputError: They are not what was written.
        """
        if position not in self._verified and self.path is not None:
            if not self._is_whole(self.index["classes"][position]):
                raise InputError(
                    f"the images of class {self.classes[position]} in {self.path} are damaged: "
                    f"{_REPAIR}"
                )
            self._verified.add(position)

    def _is_whole(self, entry: dict[str, Any]) -> bool:
        rows, first = entry["rows"], entry["first"]
        if self.path is None:
            digest = hashlib.sha256(self.images[first : first + rows].tobytes()).hexdigest()
        else:
            digest = block_digest(str(self.path / IMAGES), first, rows, self.size**2 * CHANNELS)
        return digest == entry["sha256"]

    def damaged(self, progress: Callable[[int], None] = lambda images: None) -> list[str]:
        """Return the names of the classes whose checksum fails.

        ``progress`` is called with the number of rows of each class.
        """
        names = []
        for entry in self.index["classes"]:
            if not self._is_whole(entry):
                names.append(entry["name"])
            progress(entry["rows"])
        return names

    def __repr__(self) -> str:
        place = "in memory" if self.path is None else str(self.path)
        return f"ImageStore({place}: {len(self.classes)} classes, {self.size} x {self.size})"


_REPAIR = "run fastlr data prepare again with the same source, which mends it"
