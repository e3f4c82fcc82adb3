"""A contender beside plain rounds, in its own process: the ratio within each round counts.

Plain rounds vary by two within minutes on a shared machine, and what one contender leaves of its
memory (pieces, pages given back) is another's page faults. So every contender has a process, in
which plain and it take turns.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from fastlr.errors import first_line

LIMIT = 1800.0  # seconds that one answer may take


@dataclass
class Work:
    """One plain round and one round of a contender.

    Attributes:
        plain: the unit of the ratios: one forward and backward pass over the same samples.
        run: the contender.
        check: hold the contender to the truth; raises `Wrong` where it is not right, else returns
            what the record says of it.
        device: where both run.
    """

    plain: Callable[[], Any]
    run: Callable[[], Any]
    check: Callable[[], Mapping[str, Any]] = dict
    device: torch.device = torch.device("cpu")


class Wrong(Exception):
    """A contender's numbers are not the truth's."""


class CannotRun(Exception):
    """A contender failed, was killed or gave no answer in time."""


def ratios(own: list[float], plain: list[float]) -> dict[str, float]:
    """Median and 20 % and 80 % quantile of the ratio within a round, and median seconds of both."""
    low, middle, high = np.quantile(np.divide(own, plain), [0.2, 0.5, 0.8]).tolist()
    seconds = {"seconds": statistics.median(own), "plain_seconds": statistics.median(plain)}
    return {"ratio": middle, "ratio_p20": low, "ratio_p80": high, **seconds}


class Child:
    """A process that makes a `Work` and does one of its parts when asked.

    Args:
        factory: a function of a module, called there with ``args``; returns the `Work`.
        args: for the factory, hashable.
        watch_memory: large blocks are mapped one by one, so that what is freed is gone and the peak
            is of live memory.
    """

    def __init__(
        self, factory: Callable[..., Work], *args: Any, watch_memory: bool = False
    ) -> None:
        self._pool, self._made_by = ProcessPoolExecutor(1, get_context("spawn")), (factory, *args)
        self._environment = {"PYTHONWARNINGS": "ignore"}
        if watch_memory:
            self._environment |= {
                "MALLOC_MMAP_THRESHOLD_": "262144",
                "MALLOC_TRIM_THRESHOLD_": "262144",
            }

    def ask(self, part: str) -> Any:
        """Let the child do one part, and return its answer.

        The parts are "plain" or "run" (seconds), "peaks" (bytes of both) or "check" (facts).

        Raises:
            Wrong: the contender is not right. CannotRun: it failed, was killed, or took longer than
                LIMIT.
        """
        with mock.patch.dict(os.environ, self._environment):
            answer = self._pool.submit(_answer, part, *self._made_by)
        try:
            return answer.result(LIMIT)
        except (Wrong, CannotRun):
            raise
        except Exception as error:
            raise CannotRun(f"{type(error).__name__}: {first_line(error)}") from error

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        for process in active_children():  # also one that gave no answer in time
            process.kill()
        self._pool.shutdown()


_made = cache(lambda factory, *args: factory(*args))


def _answer(part: str, *made_by: Any) -> Any:
    """Do a part in the child; any exception but `Wrong` becomes `CannotRun`, which can be sent."""
    try:
        return _done(_made(*made_by), part)
    except Wrong:
        raise
    except Exception as error:
        raise CannotRun(f"{type(error).__name__}: {first_line(error)[:300]}") from None


def _done(work: Work, part: str) -> Any:
    if part == "check":
        return dict(work.check())
    if part == "peaks":
        before, peaks = in_use(work.device), []
        for function in (work.plain, work.run):
            function()  # the first call makes plans and thread pools
            peaks.append(peak_bytes(function, work.device, before))
        return peaks
    return seconds_of(getattr(work, part), work.device)


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, with all that it has the device do."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    gc.collect()
    wait()
    start = time.perf_counter()
    result = function()
    wait()
    seconds = time.perf_counter() - start
    del result
    return seconds


# --------------------------------------------------------------------------------------------------
# memory
def resident(name: str = "VmRSS") -> int:
    """Return the bytes of this process in memory: now ("VmRSS") or at most ("VmHWM").

    Off Linux it is the peak of its whole life.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def in_use(device: torch.device) -> int:
    """Return the bytes held now: allocated on a GPU, else resident.

    Before resident bytes are read, what is free goes back to the system.
    """
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident()


def peak_bytes(function: Callable[[], Any], device: torch.device, before: int) -> int:
    """Most bytes that are held during a call, beyond ``before``."""
    in_use(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with suppress(OSError):  # then the peak of the whole life counts
        # Sets the record of the peak to the present size.
        Path("/proc/self/clear_refs").write_text("5")
    function()
    return max(0, resident("VmHWM") - before)
