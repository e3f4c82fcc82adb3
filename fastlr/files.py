"""Write files so that they survive kills and losses of power, and lock folders.

Only one process writes in a locked folder.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import socket
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastlr.errors import FastlrError, InputError, warn

LOCK = "run.lock"
MOST_UNPACKED = 100  # times its size, of a zip file: torch.save packs nothing


def now() -> str:
    """Return the date and time, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Turn errors of writing a file into clear ones.

    Raises:
        InputError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of writing a folder that can be gone on with into clear ones.

    Raises:
        InputError: It cannot be written. FastlrError: The disk is full.
    """
    with write_errors(path):
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise FastlrError(
                    f"{path}: {error.strerror}; what was written before is intact: make room, then "
                    "go on with --resume"
                ) from error
            raise


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the name under which a file is to be written, which takes its place at the end.

    Where the writing fails, as on a full disk, what was there before stays, and nothing partial. A
    link stays one; what is no regular file, such as ``/dev/stdout``, is written directly.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        yield Path(path)
        return
    partial = place.with_name(f"{place.stem}.part{place.suffix}")
    try:
        yield partial
        os.replace(partial, place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        InputError: It cannot be written.
    """
    with write_errors(path), written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_all(file: int, data: Any) -> None:
    """Write all bytes to a file descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def replace_file(path: Path, data: Any) -> None:
    """Write bytes or text to a file, replacing what it holds atomically.

    At any moment, also after a loss of power, the old or the new content is there.

    Raises:
        InputError: It cannot be written. FastlrError: The disk is full.
    """
    partial = path.with_name(path.name + ".part")
    with disk_errors(path):
        try:
            with open(partial, "wb", buffering=0) as file:
                write_all(file.fileno(), data.encode() if isinstance(data, str) else data)
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def save_file(path: Path, content: Any) -> None:
    """``torch.save`` with the care and the errors of `replace_file`."""
    import torch

    buffer = io.BytesIO()  # torch.save straight to a full disk can end the process
    torch.save(content, buffer)
    replace_file(path, buffer.getbuffer())


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        InputError: The file cannot be read, or holds anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no JSON object")
    return content


def read_tensors(path: Path) -> Any:
    """Read what `torch.save` or safetensors wrote, onto the CPU.

    Code that the file may contain is not run.

    torch.load does not look at the checksums of its zip files, so they are looked at here: one byte
    that has changed is an error. Where there are none (``set_crc32_options(False)``, torch's old
    format, safetensors) nobody can tell, and for torch's files a warning says so.

    Raises:
        InputError: A checksum fails, or a zip file would unpack to more than `MOST_UNPACKED` times
            its size. Anything else is as torch, pickle, zip and safetensors raise it.
    """
    import torch

    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    verified = False
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            unpacked = sum(entry.file_size for entry in file.infolist())
            if unpacked > MOST_UNPACKED * path.stat().st_size:
                raise InputError(
                    f"{path} would unpack to {unpacked:,} bytes, over {MOST_UNPACKED} times its "
                    "size: where you trust it, unpack it and store it again with zip -0"
                )
            names = file.namelist()
            failing = [name for name in names if not _is_whole(file, name)]
        if failing and len(failing) < len(names):
            raise InputError(
                f"{path} is damaged: the checksum of {failing[0]} in it fails; copy or save it "
                "again"
            )
        verified = not failing
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not verified:
        warn(f"{path} has no checksums: whether it is as it was saved cannot be verified")
    return content


def _is_whole(file: zipfile.ZipFile, name: str) -> bool:
    """Return True if an entry of a zip file has its checksum."""
    try:
        with file.open(name) as entry:
            while entry.read(1 << 20):
                pass
    except (zipfile.BadZipFile, zlib.error):
        return False
    return True


def lock_folder(path: Path, make: bool = False, name: str = LOCK) -> int:
    """Take the lock of a folder for this process, and return its file descriptor.

    The process holds the lock until the descriptor is closed.

    Raises:
        InputError: Another process holds it, or the folder cannot be made or locked.
        FastlrError: The disk is full.
    """
    with disk_errors(path):
        if make:
            path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(lock)
        raise InputError(
            f"{path} is being written by {holder}: wait until it ends, or choose another folder"
        ) from None
    except OSError as error:
        os.close(lock)
        raise InputError(
            f"{path} cannot be locked ({error.strerror}): choose a folder on a local disk"
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(
            lock, f"process {os.getpid()} on {socket.gethostname()} since {now()}\n".encode(), 0
        )
    except OSError:
        pass  # the lock holds without the name; a full disk is reported at the first record
    return lock


@contextmanager
def locked(path: Path, make: bool = False, name: str = LOCK) -> Iterator[None]:
    """Hold the lock of a folder within a ``with`` block; see `lock_folder`."""
    lock = lock_folder(path, make, name)
    try:
        yield
    finally:
        os.close(lock)
