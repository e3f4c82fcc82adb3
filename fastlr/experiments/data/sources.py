"""The files of a source of images, which is a folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fastlr.errors import InputError


@dataclass
class Source:
    """A folder with its listing.

    Attributes:
        path: Path of the folder.
        files: all files in it, sorted; hidden ones are not listed.
        folders: all folders in it.
    """

    path: Path
    files: list[str]
    folders: set[str]


def list_source(path: str | Path) -> Source:
    """List a folder.

    Raises:
        InputError: It is not there, cannot be read, or holds no files.
    """
    path = Path(os.path.abspath(path))
    files, folders = _walk(path) if path.is_dir() else ([], set())
    if not files:
        what = "holds no files" if path.is_dir() else "is no folder"
        raise InputError(
            f"{path} {what}: give a folder of images or of .npy files; unpack an archive first"
        )
    return Source(path, sorted(files), folders)


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


def duplicate(names: Iterable[str]) -> str | None:
    """Return a name that is there more than once, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
