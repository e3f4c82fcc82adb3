"""The files of a source of images: of a folder, or of a .zip file, which is not unpacked."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fastlr.errors import InputError
from fastlr.experiments.data.decode import Files, open_zip


@dataclass
class Source:
    """A folder or zip archive with its listing.

    Attributes:
        path: of the folder or archive.
        zipped: True for an archive.
        prefix: folders that wrap everything ("" or with a slash at the end).
        files: all files below the prefix, sorted; hidden ones are not listed.
        folders: all folders below the prefix.
        checksums: of each file, for archives.
    """

    path: Path
    zipped: bool
    prefix: str
    files: list[str]
    folders: set[str]
    checksums: dict[str, int]

    @property
    def place(self) -> Files:
        """The folder or archive, whose files are named with the prefix."""
        return Files(str(self.path), self.zipped)


def list_source(path: str | Path) -> Source:
    """List a folder or a .zip file.

    Raises:
        InputError: It is not there, is neither, cannot be read, is encrypted or compressed
            otherwise than by deflate, or holds two files of one name.
    """
    path = Path(os.path.abspath(path))
    checksums: dict[str, int] = {}
    if path.is_dir():
        files, folders = _walk(path)
    elif path.is_file():
        files, folders, checksums = _list_archive(path)
    else:
        what = "is neither a folder nor a file" if path.exists() else "does not exist"
        raise InputError(
            f"{path} {what}: give a folder of images or of .npy files, or a .zip of one"
        )
    if not files:
        raise InputError(
            f"{path} holds no files: give a folder of images or of .npy files, or a .zip of one"
        )
    files.sort()
    prefix = _wrapper(files, folders)
    cut = len(prefix)
    below = {name[cut:] for name in folders if name.startswith(prefix)} - {""}
    checksums = {name[cut:]: checksum for name, checksum in checksums.items()}
    return Source(path, not path.is_dir(), prefix, [name[cut:] for name in files], below, checksums)


def _walk(path: Path) -> tuple[list[str], set[str]]:
    """Return the files and the folders below a folder."""
    files: list[str] = []
    folders: set[str] = set()

    def fail(error: OSError) -> None:
        raise InputError(f"cannot list {error.filename}: {error.strerror}") from error

    seen: dict[str, str] = {}  # the folder that a path leads to -> the path
    for folder, inside, names in os.walk(path, followlinks=True, onerror=fail):
        earlier = seen.setdefault(os.path.realpath(folder), folder)
        if earlier is not folder:
            raise InputError(
                f"{folder} and {earlier} are one folder: remove the link, or its images would "
                "count twice"
            )
        inside[:] = sorted(name for name in inside if not _hidden(name))
        below = os.path.relpath(folder, path).replace(os.sep, "/")
        below = "" if below == "." else below + "/"
        folders.update(below + name for name in inside)
        files += [below + name for name in names if not _hidden(name)]
    return files, folders


def _list_archive(path: Path) -> tuple[list[str], set[str], dict[str, int]]:
    """Return the files and the folders in an archive, and the checksum of each file."""
    try:
        listed = open_zip(str(path)).infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise InputError(
            f"{path} is no readable .zip file ({error}): give a folder or a whole zip file"
        ) from error
    infos = [info for info in listed if not any(map(_hidden, info.filename.split("/")))]
    if any(info.flag_bits & 1 for info in infos):
        raise InputError(f"{path} is encrypted: unpack it and give the folder")
    for info in infos:
        if info.filename.startswith("/"):
            raise InputError(
                f"{path} holds {info.filename}, a path from the root: make the archive anew, from "
                "within its folder"
            )
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # Python unpacks others without a bound.
            raise InputError(
                f"{info.filename} of {path} is not compressed by deflate: make the archive anew "
                "with it"
            )
    files = [info.filename for info in infos if not info.is_dir()]
    twice = duplicate(files)
    if twice is not None:
        raise InputError(f"{path} holds {twice} twice: make the archive anew with one of them")
    folders = {info.filename.rstrip("/") for info in infos if info.is_dir()}
    folders |= {str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}
    return files, folders, {info.filename: info.CRC for info in infos}


def _wrapper(files: list[str], folders: set[str]) -> str:
    """Return the folders that hold everything, such as "tiny-imagenet-200/" ("" without any)."""
    prefix = ""
    while True:
        head = prefix + files[0][len(prefix) :].split("/", 1)[0] + "/"
        if head == prefix + "train/" or not _holds_all(head, prefix, files, folders):
            return prefix
        prefix = head


def _holds_all(head: str, prefix: str, files: list[str], folders: set[str]) -> bool:
    """Return True if all that ``prefix`` holds is in its folder ``head``, in folders or as .npy."""
    if not all(name.startswith(head) for name in files):
        return False
    if any(name.startswith(prefix) and not (name + "/").startswith(head) for name in folders):
        return False
    below = [name[len(head) :] for name in files]
    if any("/" in name for name in below):
        return True
    return all(name.lower().endswith(".npy") for name in below)


def duplicate(names: Iterable[str]) -> str | None:
    """Return a name that is there more than once, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
