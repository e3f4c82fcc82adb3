"""Small image sources for the tests of fastlr.experiments.data: a key tells every pixel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from fastlr.experiments.data import ImageStore

SIZE = 8


def pixels(key: int, height: int = SIZE, width: int = SIZE) -> np.ndarray:
    return np.random.default_rng(key).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, image: np.ndarray | Image.Image, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **options)


def imagenet(root: Path, classes: int = 3, train: int = 4, val: int = 2) -> Path:
    """PNG files with the pixels of key (class, split, image)."""
    for c in range(classes):
        for split, count in (("train", train), ("val", val)):
            for i in range(count):
                key = 1000 * c + 100 * (split == "val") + i
                save(root / split / f"n{c}" / f"{i}.png", pixels(key))
    return root


def folder(root: Path, classes: int = 3, count: int = 10) -> Path:
    for c in range(classes):
        for i in range(count):
            save(root / f"c{c}" / f"{i}.png", pixels(1000 * c + i))
    return root


def zipped(root: Path, wrapper: str = "") -> Path:
    target = root.with_suffix(".zip")
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file():
                archive.write(path, wrapper + path.relative_to(root).as_posix())
    return target


def rows(store: ImageStore, position: int, split: str) -> np.ndarray:
    start, stop = store.range(position, split)
    return np.array(store.images[start:stop])


def content(path: Path) -> tuple[bytes, bytes]:
    return (path / "images.u8").read_bytes(), (path / "index.json").read_bytes()
