"""Kernels are compiled ahead of their launches, side by side, by processes of their own.

In: launches that `noted` has noted. Out: Triton's cache on disk, in which the launches find what
was compiled. The processes have no GPU: they import fastlr's kernels and nothing of the user's, and
go the way of a launch up to the compiled kernel, so that it is found under the same key. What does
not compile there is left to the launch, which says why.

Usage: ``python -m fastlr.ops.compile_ahead``, with pickled launches on its standard input.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_PROCESSES = 16
# The same packages as here, wherever they were found, and none of the folder that it is run in.
_STARTED = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "import pickle; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from fastlr.ops.compile_ahead import main; main()"
)


class Memory(NamedTuple):
    """A tensor, as far as the compiler knows it.

    Attributes:
        dtype: of its elements.
        offset: bytes from an address that is a multiple of 16.
    """

    dtype: torch.dtype
    offset: int


class Launch(NamedTuple):
    """All that a compiled variant of a kernel depends on.

    Attributes:
        module: in which the kernel is.
        kernel: its name there.
        args: its arguments but for constants; tensors as `Memory`.
        constants: its constants, and the compiler's options.
    """

    module: str
    kernel: str
    args: tuple[Any, ...]
    constants: dict[str, Any]


class Architecture(NamedTuple):
    """What is compiled for, as Triton names it: cuda, 90 and 32 of an H100."""

    backend: str
    arch: int
    warp_size: int


def noted() -> tuple[dict[str, Launch], Callable[..., None]]:
    """Return launches by compiled variant, none yet, and what `ops.noting_launches` calls."""
    launching = import_module("fastlr.kernels.launching")
    launches: dict[str, Launch] = {}

    def note(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        name = launching.variant(kernel, args, constants)
        function = kernel.fn
        launches[name] = Launch(
            function.__module__,
            function.__name__,
            tuple(_seen(a) for a in args),
            constants | launching.FUSED,
        )

    return launches, note


def _seen(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return Memory(argument.dtype, argument.data_ptr() % 16)
    return argument


@cache
def hash_triton_in_background() -> Thread:
    """Hash Triton's own files in a thread, once a process.

    The hash is part of the key of every compiled kernel. It takes 2 s, and the first launch waits
    for it. Triton must be installed.

    Returns:
        The thread, which nothing has to wait for.
    """
    cache_module = import_module("triton.runtime.cache")

    def hash_files() -> None:
        with suppress(Exception):  # the first launch hashes them itself, and raises
            cache_module.triton_key()

    thread = Thread(target=hash_files, daemon=True)
    thread.start()
    return thread


def processes() -> int:
    """Return how many processes compile side by side: as many as cores of this rank's share."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(MOST_PROCESSES, (available or 1) // ranks))


def compile_side_by_side(noting: Callable[[], list[Launch]], target: Architecture) -> bool:
    """Compile the variants of kernels that launches need, into Triton's cache on disk.

    The processes import what they need while ``noting`` finds the launches.

    Returns True if all of them were compiled. In a program packed with its Python none are: there
    is no interpreter to start, and what would start is the program itself.
    """
    if getattr(sys, "frozen", False):
        return False
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes()):
            started.append(_start())
        launches = noting()
        for first, process in enumerate(started):
            _give(process, (launches[first :: len(started)], target))
        return [process.wait() for process in started] == [0] * len(started)
    except BrokenPipeError:  # one has ended before it read: the launches compile
        return False
    finally:
        for process in started:
            process.kill()
            process.wait()


def _start() -> subprocess.Popen[bytes]:
    """Start a process that imports what compiles, and waits for its launches."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"
    environment["FASTLR_CACHE"] = "0"  # whatever starts compiles nothing ahead itself
    process = subprocess.Popen(
        [sys.executable, "-c", _STARTED],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(sys.path))
    process.stdin.flush()
    return process


def _give(process: subprocess.Popen[bytes], work: tuple[list[Launch], Architecture]) -> None:
    """Give a process its launches, and nothing more."""
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(work))
    process.stdin.close()


def main() -> None:
    """Compile the launches on standard input; the exit code is 1 if any of them failed."""
    import_module("fastlr.kernels.launching")  # with Triton, while the launches are being noted
    launches, target = pickle.load(sys.stdin.buffer)
    sys.exit(not all([compiled(launch, target) for launch in launches]))


def compiled(launch: Launch, target: Architecture) -> bool:
    """Compile what a launch needs as the launch would, and return True if that went well."""
    kernel = getattr(import_module(launch.module), launch.kernel)
    try:
        with without_gpu(target):
            args = [_stand_in(a) for a in launch.args]
            kernel.warmup(*args, grid=(1,), **launch.constants)
    except Exception:
        return False
    return True


def _stand_in(argument: Any) -> Any:
    """A tensor for Triton's compiler, which asks for its dtype and its address alone."""
    if not isinstance(argument, Memory):
        return argument
    from triton.runtime.jit import MockTensor

    stand_in = MockTensor(argument.dtype)
    stand_in.data_ptr = lambda: argument.offset
    return stand_in


@contextmanager
def without_gpu(target: Architecture) -> Iterator[None]:
    """Let Triton compile for a target without asking a driver."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class NoDevice:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget(*target)

    before = driver._active
    driver.set_active(NoDevice())
    try:
        yield
    finally:
        driver.set_active(before)


if __name__ == "__main__":
    main()
