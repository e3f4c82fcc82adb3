"""Turn a source of images into an :class:`fastlr.data.ImageStore`: ``fastlr data prepare``.

The work survives a kill at any moment. What the store is to be is written first (``plan.json``), the file of pixels is
allocated whole (so a disk that is too small is found out at once), and every class whose block has been written and
flushed gets a line in ``blocks.jsonl`` with its checksum; ``index.json`` comes last, and from then on the store exists.
The same command again keeps the classes whose checksum holds and does the others; the bytes do not depend on it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy
import PIL
from PIL import features

from fastlr.data.decode import CHANNELS, RULE, SPLITS
from fastlr.data.layouts import ClassFiles, Scan, Source, list_source, scan
from fastlr.data.store import IMAGES, INDEX, PLAN, ImageStore, build_index, index_text, read_index, write_atomically
from fastlr.data.workers import AGAIN, disk_error, run_jobs
from fastlr.errors import InputError
from fastlr.reference.counter import check_seed

JOURNAL, LOCK = "blocks.jsonl", ".lock"
MAX_SIZE = 4096
_OURS = {IMAGES, INDEX, PLAN, JOURNAL, LOCK}
Progress = Callable[[str, int, int], None]
Blocks = dict[str, dict[str, Any]]


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    size: int | None = None,
    format: str = "auto",
    workers: int | None = None,
    limit_classes: int | Sequence[str] | None = None,
    test_fraction: float = 0.2,
    npy_train: int = 600,
    seed: int = 0,
    progress: Progress | None = None,
) -> ImageStore:
    """Make an image store, go on with one that was interrupted, or check and mend a finished one.

    Args:
        source: A folder, or a .zip file of one, in a layout of :mod:`fastlr.data.layouts`.
        out: The folder of the store.
        size: Height and width of the images; None: 64, and for .npy files their own. Images are resized and cropped by
            :data:`fastlr.data.decode.RULE`.
        format: auto, imagenet, folder or npy.
        workers: Processes that decode, each a class at a time (None: one a core).
        limit_classes: The first so many classes, or the names of those wanted.
        test_fraction: Of each class, held out for testing where the layout has no split.
        npy_train: Of each .npy file, the number of training images.
        seed: Of the held-out images, in ``[0, 2**64)``.
        progress: Called with (what is done, images done, images in all).

    Returns:
        The store, opened. Corrupt images are left out and listed in its index.

    Raises:
        InputError: The source or an argument is wrong, ``out`` holds something else or a store of other settings, or
            another process is writing there.
        OSError: The disk is full, or cannot be written.
    """
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}")
    seed, folder = check_seed(seed), Path(os.path.abspath(out))
    listing = list_source(source)
    real = listing.path.resolve()
    if folder.resolve() == real or (not listing.zipped and real in folder.resolve().parents):
        raise InputError(f"{folder} lies in the source {listing.path}: choose a folder outside it")
    found = scan(
        listing, format, test_fraction=test_fraction, npy_train=npy_train, seed=seed, limit=limit_classes
    )  # fmt: skip
    if size is None:
        size = found.classes[0].shape[-1] if found.classes[0].shape else 64
    if not 1 <= size <= MAX_SIZE:
        raise InputError(f"size {size}: choose 1 to {MAX_SIZE} pixels")
    plan = {
        "source": str(listing.path),
        "kind": found.kind,
        "size": size,
        "rule": RULE,
        "test_fraction": test_fraction if found.held_out else None,
        "seed": seed if found.held_out else None,
        "npy_train": npy_train if found.kind == "npy" else None,
        "classes": len(found.classes),
        "listed": sum(entry.rows for entry in found.classes),
        "fingerprint": listing.fingerprint(found.classes),
        "ignored": found.ignored,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _make(folder, listing, found, plan, workers, progress or (lambda *_: None))
    except OSError as error:
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            raise InputError(f"{folder} is no folder: choose another") from error
        if AGAIN in str(error):  # it says what to do already
            raise
        raise disk_error(error.errno, f"cannot write {folder}: {error.strerror or error}") from error
    return ImageStore.open(folder)


def _make(folder: Path, listing: Source, found: Scan, plan: dict[str, Any], workers: int, progress: Progress) -> None:
    blocks = _earlier(folder, plan)
    _allocate(folder / IMAGES, plan["listed"] * plan["size"] ** 2 * CHANNELS)
    first, starts = 0, []
    for entry in found.classes:
        starts.append(first)
        first += entry.rows

    blocks = _intact(folder, found, starts, plan["size"], blocks, workers, progress)
    if len(blocks) == len(found.classes) and (folder / INDEX).exists():
        _tidy(folder)
        return
    write_atomically(folder / PLAN, json.dumps(plan, indent=2) + "\n")
    write_atomically(folder / JOURNAL, "".join(json.dumps(block) + "\n" for block in blocks.values()))
    (folder / INDEX).unlink(missing_ok=True)

    place = {"out": str(folder / IMAGES), "size": plan["size"]}
    jobs = [
        (i, _job(listing, entry, first=starts[i], **place))
        for i, entry in enumerate(found.classes)
        if entry.name not in blocks
    ]
    done, total = sum(blocks[name]["rows"] for name in blocks), plan["listed"]
    progress("decoding", done, total)

    def report(images: int) -> None:
        nonlocal done
        done += images
        progress("decoding", done, total)

    jpeg = features.version_feature("libjpeg_turbo") or features.version_codec("jpg")
    decoder = f"Pillow {PIL.__version__}, libjpeg {jpeg}, numpy {numpy.__version__}"
    with (
        open(folder / JOURNAL, "a", encoding="utf-8") as journal,
        closing(run_jobs(jobs, workers, report)) as results,
    ):
        for i, result in results:
            assert isinstance(result, dict)
            entry = found.classes[i]
            _check_not_empty(entry, result, listing)
            block = {"name": entry.name, "rows": entry.rows, **result, "decoder": decoder}
            journal.write(json.dumps(block) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
            blocks[entry.name] = block
    from fastlr import __version__

    versions = {"fastlr": __version__, "decoders": sorted({block["decoder"] for block in blocks.values()})}
    index = build_index(plan, [blocks[entry.name] for entry in found.classes], versions)
    write_atomically(folder / INDEX, index_text(index))
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Remove what only an unfinished store needs."""
    for name in (JOURNAL, PLAN):
        (folder / name).unlink(missing_ok=True)


def _job(listing: Source, entry: ClassFiles, **where: Any) -> dict[str, Any]:
    """The job of :func:`fastlr.data.decode.write_class` for a class; ``where`` gives out, first and size."""
    source = {"root": str(listing.path), "zipped": listing.zipped}
    files = {"train": entry.train, "test": entry.test}
    arrays = {"npy": entry.npy, "npy_train": entry.npy_train, "shape": entry.shape}
    return {**source, **files, **arrays, "rows": entry.rows, **where}


def _check_not_empty(entry: ClassFiles, result: dict[str, Any], listing: Source) -> None:
    for split in SPLITS:
        if not result[split]:
            bad = next(item for item in result["left_out"] if item["split"] == split)
            raise InputError(
                f"class {entry.name} of {listing.path}: all its images for {split} are corrupt ({bad['file']}: "
                f"{bad['reason']}): mend or remove them, or name the wanted classes by --limit-classes"
            )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system releases it when this process ends, however it ends."""
    import fcntl

    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InputError(
                f"another process (id {file.read().strip() or 'unknown'}) is writing {folder}: wait for it, or choose "
                "another folder"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _earlier(folder: Path, plan: dict[str, Any]) -> Blocks:
    """Return the blocks that an earlier run has written, by class; refuse a folder of something else."""
    if (folder / INDEX).exists():
        index = read_index(folder)
        earlier, decoder = index["plan"], " or ".join(index["versions"]["decoders"])
        entries = [{**entry, "decoder": decoder} for entry in index["classes"]]
        for entry in entries:
            entry |= {split: entry[split][1] - entry[split][0] for split in SPLITS}
            del entry["first"]
    elif (folder / PLAN).exists():
        earlier = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        entries = _journal(folder / JOURNAL)
    else:
        foreign = sorted(path.name for path in folder.iterdir() if path.name.removesuffix(".part") not in _OURS)
        if foreign:
            raise InputError(f"{folder} holds something else ({foreign[0]}): choose a new or empty folder")
        return {}
    for key in plan:
        if key not in ("source", "ignored") and earlier.get(key) != plan[key]:
            what = "other files of the source" if key == "fingerprint" else f"{key} {earlier.get(key)}"
            now = "" if key == "fingerprint" else f", not {plan[key]}"
            raise InputError(f"{folder} holds a store made with {what}{now}: choose another folder, or remove it")
    return {entry["name"]: entry for entry in entries}


def _journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the journal; a kill can leave half a line at its end."""
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    return entries


def _intact(
    folder: Path, found: Scan, starts: list[int], size: int, blocks: Blocks, workers: int, progress: Progress
) -> Blocks:
    """The blocks whose checksum holds."""
    known = [(i, entry) for i, entry in enumerate(found.classes) if entry.name in blocks]
    row_bytes, path = size**2 * CHANNELS, str(folder / IMAGES)
    jobs = [(i, {"check": [path, starts[i], entry.rows, row_bytes]}) for i, entry in known]
    done, total, intact = 0, sum(entry.rows for _, entry in known), {}
    small = total * row_bytes < 1 << 28  # then starting processes would take longer
    for i, digest in run_jobs(jobs, 1 if small else workers, lambda images: None):
        entry = found.classes[i]
        if digest == blocks[entry.name]["sha256"]:
            intact[entry.name] = blocks[entry.name]
        done += entry.rows
        progress("checking", done, total)
    return {entry.name: intact[entry.name] for _, entry in known if entry.name in intact}


def _allocate(path: Path, size: int) -> None:
    """Give the file its full size and its place on the disk, so that a disk that is too small is found out now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        before = os.fstat(descriptor).st_size
        if before == size:
            return
        try:
            _reserve(descriptor, path, size)
            os.truncate(path, size)  # where it was longer
        except OSError as error:
            os.truncate(path, min(before, size))
            text = f"{path} needs {size / 1e9:.2f} GB, {shutil.disk_usage(path.parent).free / 1e9:.2f} GB are free"
            raise disk_error(error.errno, f"{text} ({error.strerror or error})") from error
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, path: Path, size: int) -> None:
    unsupported = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in unsupported:
                raise
    if shutil.disk_usage(path).free < size - os.fstat(descriptor).st_size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.truncate(path, size)
