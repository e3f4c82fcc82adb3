"""Comparisons of kernels with plain torch that were passed on this machine, kept on disk.

A later process need not make them again. They hold for one key, `made_for`: where anything in it
is another, or cannot be told, nothing of the file is believed. Neither is a file that is damaged,
of another user, or from before fastlr's own files were changed.

The file is in the folder that ``FASTLR_CACHE`` names, else in ``fastlr`` in the user's folder of
caches (``XDG_CACHE_HOME``, ``~/.cache``); with ``FASTLR_CACHE=0`` nothing is read or written. A
file that cannot be read or written is no error: kernels are compared again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

_IMPORTED = time.time()  # fastlr's files may be newer than what is loaded of them if changed later
DRIVER = Path("/proc/driver/nvidia/version")
# Of the environment, beside what Triton itself says: what its compiler, ptxas and LLVM read, and
# what products of plain torch are made with whatever it is told.
_COMPILERS = (
    *("TRITON_", "PTXAS_", "NVPTX_", "LLVM_", "DISABLE_", "CUDA_FORCE_", "CUDA_DISABLE_"),
    "NVIDIA_TF32_",
)
_OVERRIDE = "TRITON_KERNEL_OVERRIDE"  # code from files, which nothing here looks at
_PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR")  # of files, which change nothing

Passed = set[tuple[str, str]]  # op and kind of call


def folder() -> Path | None:
    """Return the folder of what fastlr keeps of this machine; None where it is to keep nothing.

    Nor is there one where the user has no folder: in a container of nobody's, say.
    """
    named = os.environ.get("FASTLR_CACHE")
    if named == "0":
        return None
    if named:
        return Path(named)
    places = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    return next((Path(place, "fastlr") for place in places if os.path.isabs(place)), None)


def made_for(device: int) -> dict[str, str] | None:
    """Return all that a comparison on a GPU depends on but the call itself.

    None on a CPU, and where any of it cannot be told: with another environment than the first time,
    too, as kernels may have been compiled with either.
    """
    if device < 0 or _OVERRIDE in os.environ:
        return None
    try:
        key = _described(device)
        return None if sources_changed() or key["environment"] != _environment() else key
    except Exception:  # Triton's own functions differ by version, and files may be gone
        return None


@cache
def _described(device: int) -> dict[str, str]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    gpu: Any = torch.cuda.get_device_properties(device)
    ptxas = make_backend(GPUTarget("cuda", 10 * gpu.major + gpu.minor, 32)).hash()
    return {
        "fastlr": _digest_of_sources(),
        "triton": digest(_triton()),
        "ptxas": ptxas,
        "environment": _environment(),
        "torch": f"{torch.__version__} {torch.version.git_version} CUDA {torch.version.cuda}",
        "driver": DRIVER.read_text(),
        "GPU": f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count} {gpu.total_memory}",
    }


def _environment() -> str:
    """Return the variables that change what is compiled, and what it is compared with."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    compilers = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_COMPILERS) and name not in _PLACES
    }
    return repr(sorted((compilers | get_cache_invalidating_env_vars()).items()))


def _triton() -> str:
    """Return what Triton's cache knows itself by: its version and a digest of all of its files."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        from triton.compiler.compiler import triton_key
    return triton_key()


@cache
def _sources() -> list[Path]:
    """The files that kernels, their launches, plain torch's twins and comparisons are made of.

    Raises:
        FileNotFoundError: there are none, as in a zip file.
    """
    folders = [
        folder
        for package in ("fastlr.kernels", "fastlr.ops")
        for folder in import_module(package).__path__
    ]
    files = [path for folder in folders for path in Path(folder).rglob("*")]
    sources = sorted(path for path in files if path.suffix in (".py", ".json"))
    if not sources:
        raise FileNotFoundError("fastlr's sources are no files")
    return sources


def sources_changed() -> bool:
    """Return True if a file is newer than its import, so that nobody knows what was compared."""
    return any(path.stat().st_ctime > _IMPORTED for path in _sources())


def _digest_of_sources() -> str:
    return digest("\n".join(f"{path.name} {digest(path.read_text())}" for path in _sources()))


def digest(text: str) -> str:
    """Return the hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


class KeptComparisons:
    """The comparisons that are kept of each GPU.

    Args:
        believed: False to compare anew what earlier processes have passed.
    """

    def __init__(self, believed: bool = True) -> None:
        self._believed = believed
        self._read: dict[Path, Passed] = {}

    def passed(self, device: int, name: str, kind: str) -> bool:
        """Return True if an op's kernel has passed the comparison for calls of this kind."""
        key = made_for(device)
        path = _file(key)
        if key is None or path is None or not self._believed:
            return False
        if path not in self._read:
            self._read[path] = read(path, key)
        return (name, kind) in self._read[path]

    def enter(self, device: int, name: str, kind: str) -> None:
        """Keep that an op's kernel has passed the comparison for calls of this kind."""
        self._change(device, lambda passed: passed | {(name, kind)})

    def forget(self, device: int, name: str) -> None:
        """Drop all comparisons of an op's kernel, of which one has failed."""
        self._change(device, lambda passed: {each for each in passed if each[0] != name})

    def _change(self, device: int, changed: Callable[[Passed], Passed]) -> None:
        key = made_for(device)
        path = _file(key)
        if key is None or path is None:
            return
        self._read[path] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _alone(path.parent):
                # With what others have written since.
                self._read[path] = changed(read(path, key))
                write(path, key, self._read[path])
        except OSError:  # what cannot be written is not there
            with suppress(OSError):
                path.unlink(missing_ok=True)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Let no other process or thread change the files of a folder meanwhile.

    Else what one forgets another, who has read it before, writes once more.
    """
    import fcntl  # not everywhere, as GPUs are not

    with open(place / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _file(key: dict[str, str] | None) -> Path | None:
    place = folder()
    if key is None or place is None:
        return None
    return place / f"comparisons-{digest(json.dumps(key))[:16]}.json"


def read(path: Path, key: dict[str, str]) -> Passed:
    """Return what a file holds for this key; nothing where it is not whole, or not the user's."""
    try:
        if path.stat().st_uid != os.getuid():
            return set()
        content = json.loads(path.read_text(encoding="utf-8"))
        passed = content["passed"]
        whole = content["made_for"] == key and content["digest"] == digest(json.dumps(passed))
        return {(name, kind) for name, kind in passed} if whole else set()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def write(path: Path, key: dict[str, str], passed: Passed) -> None:
    """Write a file whole or not at all."""
    from fastlr.files import written_whole  # not everywhere, as GPUs are not

    listed = sorted(map(list, passed))
    content = {"made_for": key, "passed": listed, "digest": digest(json.dumps(listed))}
    with written_whole(path) as partial:
        partial.write_text(json.dumps(content, indent=0), encoding="utf-8")


def summary() -> str:
    """Say how many comparisons are kept, and where."""
    place = folder()
    if place is None:
        return "none: FASTLR_CACHE=0, or the user has no folder"
    files = sorted(place.glob(f"comparisons-{16 * '?'}.json")) if place.is_dir() else []
    return f"{len(files)} machines or versions in {place}" if files else f"none yet in {place}"
