"""Turn a source of images into an `ImageStore`: the work of ``fastlr data prepare``.

The work survives a kill at any moment. What the store is to be is the first line of
``blocks.jsonl``, the file of pixels gets its whole size (a disk that is too small is found out at
once), and every class whose block has been written and flushed gets a line there with its checksum;
``index.json`` comes last, and from then on the store exists. The same command again keeps the
classes whose checksum holds and does the others; the bytes do not depend on it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import PIL
from PIL import features

from fastlr.errors import InputError
from fastlr.experiments.data.decode import (
    CHANNELS,
    RULES,
    SPLITS,
    block_digest,
    write_class,
)
from fastlr.experiments.data.layouts import ClassFiles, names_checksum, scan
from fastlr.experiments.data.sources import Source, list_source
from fastlr.experiments.data.store import (
    IMAGES,
    INDEX,
    JOURNAL,
    ImageStore,
    build_index,
    read_index,
)
from fastlr.experiments.data.workers import AGAIN, disk_error, results
from fastlr.files import locked, replace_file
from fastlr.ops.philox import check_seed

LOCK = ".lock"
MAX_SIZE = 4096
_OURS = {IMAGES, INDEX, JOURNAL, LOCK}
ShowProgress = Callable[[str, int, int], None]
Blocks = dict[str, dict[str, Any]]


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    size: int | None = None,
    resize: str | None = None,
    format: str = "auto",
    workers: int | None = None,
    limit_classes: int | Sequence[str] | None = None,
    test_fraction: float = 0.2,
    npy_train: int = 600,
    seed: int = 0,
    progress: ShowProgress | None = None,
) -> ImageStore:
    """Make an image store, go on with one that was interrupted, or check and mend a finished one.

    Args:
        source: A folder in a layout of :mod:`fastlr.experiments.data.layouts`.
        out: The folder of the store.
        size: Height and width of the images; None: 64, and for .npy files their own.
        resize: How other images are brought to it, by :data:`fastlr.experiments.data.decode.RULES`:
            ``squash``, as in the paper, or ``crop``; None: ``squash``, and for a store that is
            there its own.
        format: auto, imagenet, folder or npy.
        workers: Threads that decode, each a class at a time (None: one a core).
        limit_classes: The first so many classes, or the names of those wanted.
        test_fraction: Share of each class, held out for testing where the layout has no split.
        npy_train: Number of training images of each .npy file.
        seed: Seed of the held-out images, in ``[0, 2**64)``.
        progress: Called with (what is done, images done, images in all).

    Returns:
        The store, opened. Corrupt images are left out and listed in its index.

    Raises:
        InputError: The source or an argument is wrong, ``out`` holds something else or a store of
            other settings, or another process is writing there.
        OSError: The disk is full, or cannot be written.
    """
    if workers is None:
        workers = len(os.sched_getaffinity(0))
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    seed, folder = check_seed(seed), Path(os.path.abspath(out))
    listing = list_source(source)
    real = listing.path.resolve()
    if real in (folder.resolve(), *folder.resolve().parents):
        raise InputError(f"{folder} lies in the source {listing.path}: choose a folder outside it")
    layout = scan(
        listing,
        format,
        test_fraction=test_fraction,
        npy_train=npy_train,
        seed=seed,
        limit=limit_classes,
    )
    if size is None:
        size = layout.classes[0].shape[-1] if layout.classes[0].shape else 64
    if not 1 <= size <= MAX_SIZE:
        raise InputError(f"size {size}: choose 1 to {MAX_SIZE} pixels")
    if resize is not None and resize not in RULES:
        raise InputError(f"resize {resize}: choose one of {', '.join(RULES)}")
    plan = {
        "source": str(listing.path),
        "kind": layout.kind,
        "size": size,
        "resize": resize,
        "test_fraction": None,
        "seed": None,
        "npy_train": None,
        "classes": len(layout.classes),
        "listed": sum(entry.rows for entry in layout.classes),
        "fingerprint": names_checksum(layout.classes),
        "ignored": layout.ignored,
    }
    if layout.held_out:
        plan.update(test_fraction=test_fraction, seed=seed)
    if layout.kind == "npy":
        plan["npy_train"] = npy_train
    with _writing(folder):
        show = progress or (lambda *_: None)
        _make(folder, listing, layout.classes, plan, workers, show)
    return ImageStore.open(folder)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make and lock the folder of a store; errors of its disk say what to do."""
    try:
        if not any((folder / name).exists() for name in (LOCK, INDEX, JOURNAL)):
            _refuse_foreign(folder)  # which gets no lock, then
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, name=LOCK):
            yield
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{folder} is no folder: choose another") from error
    except OSError as error:
        if AGAIN in str(error):  # it says what to do already
            raise
        raise disk_error(
            error.errno, f"cannot write {folder}: {error.strerror or error}"
        ) from error


def _make(
    folder: Path,
    listing: Source,
    classes: list[ClassFiles],
    plan: dict[str, Any],
    workers: int,
    progress: ShowProgress,
) -> None:
    blocks = _earlier(folder, plan)
    plan["rule"] = RULES[plan["resize"]]
    _allocate(folder / IMAGES, plan["listed"] * plan["size"] ** 2 * CHANNELS)
    blocks = _intact(folder, classes, plan["size"], blocks, workers, progress)
    if len(blocks) == len(classes) and (folder / INDEX).exists():
        (folder / JOURNAL).unlink(missing_ok=True)
        return
    lines = [json.dumps(line) + "\n" for line in (plan, *blocks.values())]
    replace_file(folder / JOURNAL, "".join(lines))
    (folder / INDEX).unlink(missing_ok=True)

    place = {
        "out": str(folder / IMAGES),
        "size": plan["size"],
        "resize": plan["resize"],
        "source": str(listing.path),
    }
    jobs = [
        ({**asdict(entry), "rows": entry.rows, **place},)
        for entry in classes
        if entry.name not in blocks
    ]
    jpeg = features.version_feature("libjpeg_turbo") or features.version_codec("jpg")
    decoder = f"Pillow {PIL.__version__}, libjpeg {jpeg}, numpy {numpy.__version__}"
    done = sum(block["rows"] for block in blocks.values())
    add = counter(progress, "decoding", plan["listed"], done)
    with open(folder / JOURNAL, "a", encoding="utf-8") as journal, warnings.catch_warnings():
        # Odd metadata, palettes with transparency, very large images.
        warnings.simplefilter("ignore")
        for (job,), result in results(write_class, jobs, workers):
            block = {"name": job["name"], "rows": job["rows"], **result, "decoder": decoder}
            _check_not_empty(block, listing)
            blocks[job["name"]] = block
            journal.write(json.dumps(block) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
            add(job["rows"])
    from fastlr import __version__

    versions = {
        "fastlr": __version__,
        "decoders": sorted({block["decoder"] for block in blocks.values()}),
    }
    index = build_index(plan, [blocks[entry.name] for entry in classes], versions)
    replace_file(folder / INDEX, json.dumps(index, indent=1) + "\n")
    (folder / JOURNAL).unlink(missing_ok=True)


def counter(progress: ShowProgress, what: str, total: int, done: int = 0) -> Callable[[int], None]:
    """Return a function that adds to the number of finished images and reports it.

    The number ``done`` is reported at once, too.
    """
    progress(what, done, total)

    def add(images: int) -> None:
        nonlocal done
        done += images
        progress(what, done, total)

    return add


def _check_not_empty(block: dict[str, Any], listing: Source) -> None:
    for split in SPLITS:
        if not block[split]:
            bad = next(item for item in block["left_out"] if item["split"] == split)
            raise InputError(
                f"class {block['name']} of {listing.path}: all its images for {split} are corrupt "
                f"({bad['file']}: {bad['reason']}): mend or remove them, or name the wanted "
                "classes by --limit-classes"
            )


def _refuse_foreign(folder: Path) -> None:
    """Raise InputError if a folder, where there is one, holds what is not of a store."""
    if not folder.is_dir():
        return
    foreign = sorted(
        path.name for path in folder.iterdir() if path.name.removesuffix(".part") not in _OURS
    )
    if foreign:
        raise InputError(
            f"{folder} holds something else ({foreign[0]}): choose a new or empty folder"
        )


def _earlier(folder: Path, plan: dict[str, Any]) -> Blocks:
    """Return the blocks that an earlier run wrote into the folder, by class.

    Refuses a folder that holds something else. A plan that leaves ``resize`` open takes that run's.
    """
    if (folder / INDEX).exists():
        index = read_index(folder)
        earlier, decoder = index["plan"], " or ".join(index["versions"]["decoders"])
        entries = [{**entry, "decoder": decoder} for entry in index["classes"]]
        for entry in entries:
            entry |= {split: entry[split][1] - entry[split][0] for split in SPLITS}
            del entry["first"]
    elif (folder / JOURNAL).exists():
        earlier, *entries = _journal(folder / JOURNAL)
    else:
        _refuse_foreign(folder)
        plan["resize"] = plan["resize"] or "squash"
        return {}
    earlier = {"resize": "crop", **earlier}  # before there was a choice
    plan["resize"] = plan["resize"] or earlier["resize"]
    for key in plan:
        if key in ("source", "ignored") or earlier.get(key) == plan[key]:
            continue
        what = f"{key} {earlier.get(key)}, not {plan[key]}"
        if key == "fingerprint":
            what = "other files of the source"
        raise InputError(
            f"{folder} holds a store made with {what}: choose another folder, or remove it"
        )
    return {entry["name"]: entry for entry in entries}


def _journal(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the journal; a kill can leave half a line at its end."""
    entries: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def _intact(
    folder: Path,
    classes: list[ClassFiles],
    size: int,
    blocks: Blocks,
    workers: int,
    progress: ShowProgress,
) -> Blocks:
    """Return the blocks whose checksum holds, in the order of the classes."""
    row_bytes, path = size**2 * CHANNELS, str(folder / IMAGES)
    written = {entry.first: entry for entry in classes if entry.name in blocks}
    if not written:
        return {}
    jobs = [(path, entry.first, entry.rows, row_bytes) for entry in written.values()]
    add = counter(progress, "checking", sum(entry.rows for entry in written.values()))
    intact = set()
    for (_, first, rows, _), digest in results(block_digest, jobs, workers):
        add(rows)
        if digest == blocks[written[first].name]["sha256"]:
            intact.add(first)
    return {entry.name: blocks[entry.name] for entry in classes if entry.first in intact}


def _allocate(path: Path, size: int) -> None:
    """Give the file its full size, if the disk has room for it.

    So a disk that is too small is found out now.
    """
    if not path.exists():
        path.touch()
    missing, free = size - 512 * path.stat().st_blocks, shutil.disk_usage(path).free
    if missing > free:
        text = f"{path} needs {missing / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free"
        raise disk_error(errno.ENOSPC, text)
    if path.stat().st_size != size:
        os.truncate(path, size)
