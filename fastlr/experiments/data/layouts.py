"""The classes of a source of images and the files of each, for the three layouts that fastlr reads.

- ``imagenet``: ``train/<class>/*.JPEG`` and, optionally, ``val/<class>/*.JPEG``, which become the
  test images.
- ``folder``: ``<class>/*.png``, the layout of torchvision's ``ImageFolder``; it has no split.
- ``npy``: ``<class>.npy``, each uint8 ``[n, 3, H, W]``, the first 600 for training (Dohare et al.,
  "Loss of plasticity in deep continual learning", Nature 632, 2024: 700 images of 32 x 32 a class).

Where there is no split, a part of each class is held out: the images whose names get the lowest
random words. These are a function of the seed, the class's name and the position in the class, so a
class keeps its split whatever other classes are there.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fastlr.errors import InputError, few
from fastlr.experiments.data.sources import Source, duplicate
from fastlr.ops.philox import STREAMS, random_words

FORMATS = ("imagenet", "folder", "npy")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
SPLIT_STREAM = STREAMS["split"]


@dataclass
class ClassFiles:
    """The images of one class: names of files for each split, or one .npy file.

    Attributes:
        name: Name of the class.
        train: files of training images, as paths below the source, sorted.
        test: files of test images.
        npy: the .npy file, or None.
        shape: Shape of its array.
        npy_train: how many of its images, from the first, are for training.
        first: the row of the store where the class begins.
    """

    name: str
    train: list[str] = field(default_factory=list)
    test: list[str] = field(default_factory=list)
    npy: str | None = None
    shape: list[int] | None = None
    npy_train: int = 0
    first: int = 0

    @property
    def rows(self) -> int:
        """The number of images listed: of rows in the store."""
        return self.shape[0] if self.shape else len(self.train) + len(self.test)


@dataclass
class Layout:
    """The classes of a source.

    Attributes:
        kind: imagenet, folder or npy.
        classes: those to be prepared, in the order of their names (of their numbers if all are
            numbers).
        held_out: True if the test images were held out, by the seed, from classes without a split.
        ignored: how many files were not used, by reason.
    """

    kind: str
    classes: list[ClassFiles]
    held_out: bool
    ignored: dict[str, int]


def names_checksum(classes: Sequence[ClassFiles]) -> str:
    """Return the SHA-256 over the classes and file names that a store is made of."""
    digest = hashlib.sha256()
    for entry in classes:
        names = [entry.npy] if entry.npy else [*entry.train, "", *entry.test]
        lines = [entry.name, str(entry.shape)]
        lines += [f"{name} " for name in names]
        digest.update("\0".join(lines).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def scan(
    source: Source,
    kind: str = "auto",
    *,
    test_fraction: float = 0.2,
    npy_train: int = 600,
    seed: int = 0,
    limit: int | Sequence[str] | None = None,
) -> Layout:
    """Find the classes of a source.

    Args:
        source: As listed.
        kind: auto, imagenet, folder or npy.
        test_fraction: Share of each class, held out as test images where the layout has no split.
        npy_train: Number of training images of each .npy file; the rest are test images.
        seed: Seed of the held-out images.
        limit: The first so many classes, or the names of those wanted; None: all.

    Raises:
        InputError: The layout is another, a class is empty or there twice, an array has a wrong
            shape or type, or a name in ``limit`` is unknown.
    """
    if kind == "auto":
        kind = _detect(source)
    elif kind not in FORMATS:
        raise InputError(f"format {kind}: choose auto, {', '.join(FORMATS)}")
    if not 0 < test_fraction < 1:
        raise InputError(
            f"test_fraction must lie between 0 and 1, got {test_fraction}: such as 0.2"
        )
    listed, ignored = {"imagenet": _imagenet, "folder": _folder, "npy": _npy}[kind](source)
    classes = _choose(listed, limit, source)
    held_out = False
    if kind == "npy":
        _npy_shapes(source, classes, npy_train)
    else:
        held_out = not any(entry.test for entry in listed)
        _check_files(source, classes, held_out)
    if held_out:
        for entry in classes:
            _hold_out(entry, test_fraction, seed)
    for before, entry in zip(classes, classes[1:]):
        entry.first = before.first + before.rows
    return Layout(kind, classes, held_out, dict(ignored))


def _check_files(source: Source, classes: list[ClassFiles], held_out: bool) -> None:
    """Refuse classes without training images, and those without test images where others have."""
    for entry in classes:
        if not entry.train:
            raise InputError(
                f"class {entry.name} of {source.path} is empty: add images, remove the folder, "
                f"{_NAMED}"
            )
        if not (entry.test or held_out):
            raise InputError(
                f"class {entry.name} of {source.path} has no images in val/: add some, {_NAMED}"
            )


_NAMED = "or name the wanted classes by --limit-classes"


def _detect(source: Source) -> str:
    if _npy_files(source):
        return "npy"
    if any(name.startswith("train/") and name.count("/") >= 2 for name in source.files):
        return "imagenet"
    if any("/" in name and _is_image(name) for name in source.files):
        return "folder"
    raise InputError(
        f"{source.path} has none of the layouts that are known: train/<class>/*.JPEG, "
        "<class>/*.png (or another kind of image) or <class>.npy"
    )


def _by_class(source: Source, base: str, ignored: Counter[str]) -> dict[str, ClassFiles]:
    """Return the classes under ``base``: its folders, with the images at any depth below each.

    This is torchvision's layout (``ImageFolder``).
    """
    classes: dict[str, ClassFiles] = {}
    cut, place = len(base), base or "the source's folder"
    for folder in sorted(source.folders):
        if folder.startswith(base) and "/" not in folder[cut:]:
            classes[folder[cut:]] = ClassFiles(folder[cut:])
    for name in source.files:
        if not name.startswith(base):
            continue
        parts = name[cut:].split("/", 1)
        if len(parts) == 1:
            ignored[f"{place}: in no class"] += 1
        elif not _is_image(name):
            ignored[f"{place}: no image by its ending"] += 1
        else:
            classes[parts[0]].train.append(name)
    return classes


def _imagenet(source: Source) -> tuple[list[ClassFiles], Counter[str]]:
    ignored: Counter[str] = Counter()
    classes = _by_class(source, "train/", ignored)
    if not classes:
        raise InputError(
            f"{source.path} has no folders train/<class>: for <class>/*.png use --format folder"
        )
    test = _by_class(source, "val/", ignored)
    if "val" in source.folders and not any(name in classes for name in test):
        raise InputError(
            f"the folder val/ of {source.path} has no folder named like a class of train/: sort "
            "its images into val/<class>/, or move it away, and test images are held out from "
            "train/"
        )
    for name, entry in test.items():
        if name in classes:
            classes[name].test = entry.train
        else:
            ignored[f"val/{name}: no class of train/"] += entry.rows
    for name in source.files:
        if not name.startswith(("train/", "val/")):
            ignored["outside train/ and val/"] += 1
    return list(classes.values()), ignored


def _folder(source: Source) -> tuple[list[ClassFiles], Counter[str]]:
    ignored: Counter[str] = Counter()
    classes = list(_by_class(source, "", ignored).values())
    if not classes:
        raise InputError(
            f"{source.path} has no folders of classes: each class needs a folder with its images"
        )
    return classes, ignored


def _npy(source: Source) -> tuple[list[ClassFiles], Counter[str]]:
    files = _npy_files(source)
    if not files:
        raise InputError(f"{source.path} has no files <class>.npy")
    ignored = Counter({"not <class>.npy": len(source.files) - len(files)})
    return [ClassFiles(name[:-4], npy=name) for name in files], +ignored


def _npy_files(source: Source) -> list[str]:
    return [name for name in source.files if "/" not in name and name.lower().endswith(".npy")]


def _npy_shapes(source: Source, classes: list[ClassFiles], npy_train: int) -> None:
    for entry in classes:
        assert entry.npy is not None
        try:
            array = np.load(source.path / entry.npy, mmap_mode="r")
        except (ValueError, EOFError, OSError) as error:
            raise InputError(
                f"{entry.npy} of {source.path} is no whole .npy file: {error}; {_WANTED}"
            ) from error
        shape, dtype = array.shape, array.dtype
        entry.shape, entry.npy_train = list(shape), npy_train
        if dtype != "uint8" or len(shape) != 4 or shape[1] != 3 or 0 in shape:
            raise InputError(f"{entry.npy} of {source.path} is {dtype} {list(shape)}; {_WANTED}")
        if shape != tuple(classes[0].shape or ()):
            raise InputError(
                f"{entry.npy} of {source.path} has shape {list(shape)} and {classes[0].npy} "
                f"{classes[0].shape}: all classes must have the same, make the odd one anew"
            )
        if not 0 < npy_train < shape[0]:
            raise InputError(
                f"{entry.npy} of {source.path} has {shape[0]} images, which {npy_train} for "
                "training leave none for testing of: give another number by --npy-train"
            )


_WANTED = "wanted is uint8 [n, 3, H, W], such as [700, 3, 32, 32]"


def _choose(
    classes: list[ClassFiles], limit: int | Sequence[str] | None, source: Source
) -> list[ClassFiles]:
    twice = duplicate(unicodedata.normalize("NFC", entry.name).strip() for entry in classes)
    if twice is not None:
        raise InputError(f"{source.path} has two classes of the name {twice}: rename one")
    classes = sorted(classes, key=lambda entry: entry.name)
    if all(entry.name.isascii() and entry.name.isdigit() for entry in classes):
        classes.sort(key=lambda entry: int(entry.name))
    if isinstance(limit, int):
        if not 1 <= limit <= len(classes):
            raise InputError(f"--limit-classes {limit}: {source.path} has {len(classes)} classes")
        classes = classes[:limit]
    elif limit is not None:
        twice = duplicate(limit)
        if twice is not None:
            raise InputError(f"--limit-classes names {twice} twice: name each class once")
        unknown = sorted(set(limit) - {entry.name for entry in classes})
        if unknown:
            raise InputError(
                f"--limit-classes: {source.path} has no class {unknown[0]}, it has {_some(classes)}"
            )
        classes = [entry for entry in classes if entry.name in limit]
    if len(classes) < 2:
        raise InputError(
            f"{source.path} gives {len(classes)} class ({_some(classes)}): a task needs two"
        )
    return classes


def _hold_out(entry: ClassFiles, fraction: float, seed: int) -> None:
    """Move a fraction of the training files, at least one, to the test files."""
    if len(entry.train) < 2:
        raise InputError(
            f"class {entry.name} has one image, and one is held out for testing: add some, {_NAMED}"
        )
    count = min(max(1, round(fraction * len(entry.train))), len(entry.train) - 1)
    digest = hashlib.sha256(entry.name.encode("utf-8", "surrogateescape")).digest()
    key = torch.tensor([int.from_bytes(digest[:8], "little", signed=True)])
    words = random_words(seed, key, SPLIT_STREAM, len(entry.train))[0]
    held_out = set(words.argsort(stable=True)[:count].tolist())
    files = entry.train
    entry.train = [name for i, name in enumerate(files) if i not in held_out]
    entry.test = [name for i, name in enumerate(files) if i in held_out]


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


def _some(classes: list[ClassFiles]) -> str:
    return few(entry.name for entry in classes)
