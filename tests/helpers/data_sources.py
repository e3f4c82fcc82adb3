"""Small image sources for the tests of fastlr.experiments.data: a key tells every pixel."""

import numpy as np
from PIL import Image

SIZE = 8


def pixels(key, height=SIZE, width=SIZE):
    return np.random.default_rng(key).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **options)


def imagenet(root, classes=3, train=4, val=2):
    """PNG files with the pixels of key (class, split, image)."""
    for c in range(classes):
        for split, count in (("train", train), ("val", val)):
            for i in range(count):
                key = 1000 * c + 100 * (split == "val") + i
                save(root / split / f"n{c}" / f"{i}.png", pixels(key))
    return root


def folder(root, classes=3, count=10):
    for c in range(classes):
        for i in range(count):
            save(root / f"c{c}" / f"{i}.png", pixels(1000 * c + i))
    return root


def rows(store, position, split):
    start, stop = store.range(position, split)
    return np.array(store.images[start:stop])


def content(path):
    return (path / "images.u8").read_bytes(), (path / "index.json").read_bytes()
