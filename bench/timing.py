"""Timing in interleaved rounds, peak memory of one call, and a record of the machine: shared by all benchmarks."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastlr.speed.clock import interleaved, quantile
from fastlr.speed.machine import cpu_name, environment, version

__all__ = ["ROOT", "cpu_name", "environment", "interleaved", "peak_above", "quantile", "summary", "version"]

ROOT = Path(__file__).resolve().parents[1]


def summary(seconds: list[float], base: list[float]) -> dict[str, float]:
    """Median, 20 % and 80 % quantile of the seconds, and of their ratio to ``base`` round by round."""
    ratios = [a / b for a, b in zip(seconds, base)]
    return {
        "seconds": statistics.median(seconds),
        "seconds_p20": quantile(seconds, 0.2),
        "seconds_p80": quantile(seconds, 0.8),
        "ratio": statistics.median(ratios),
        "ratio_p20": quantile(ratios, 0.2),
        "ratio_p80": quantile(ratios, 0.8),
    }


# --------------------------------------------------------------------------------------------------------- peak memory
def resident() -> int:
    """Bytes of this process in memory now (the whole life's peak where the system does not tell)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def trim() -> None:
    """Collect garbage and give freed memory back to the system, where the C library can."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass


def reset_peak() -> bool:
    """Set the system's record of this process's peak to its present size (Linux only); whether it worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def peak() -> int:
    """Largest number of resident bytes since :func:`reset_peak`."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_above(function: Callable[[], Any], baseline: int) -> tuple[int, float, Any]:
    """Call the function: (peak resident bytes above the baseline during the call, seconds, what it returned)."""
    trim()
    reset_peak()
    start = time.perf_counter()
    result = function()
    return max(0, peak() - baseline), time.perf_counter() - start, result


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a process whose memory is measured: large blocks are mapped one by one, so freed ones are gone.

    The same for all contenders. Without it the C library keeps freed blocks and their sum, not the peak, is seen.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": "262144",
        "MALLOC_TRIM_THRESHOLD_": "262144",
        "PYTHONWARNINGS": "ignore",
    }
