"""Timing in interleaved rounds, peak memory of one call, and a record of the machine: shared by all benchmarks."""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def quantile(values: list[float], q: float) -> float:
    """The q-quantile (0 to 1) by linear interpolation between order statistics."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def interleaved(
    functions: dict[str, Callable[[], Any]],
    rounds: int,
    *,
    warmup: int = 1,
    synchronize: Callable[[], None] | None = None,
    after_round: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every function in every round; each round calls all of them, starting one further along than the last.

    Interleaving makes the slow drift of a shared machine hit all of them alike: take ratios within a round.

    Args:
        functions: name -> a call to time; what it returns is dropped before the next is timed.
        rounds: timed rounds.
        warmup: calls of each before the first round, not timed.
        synchronize: waits for the device, called before both clock readings.
        after_round: told the number of rounds done.
    """
    wait = synchronize or (lambda: None)
    for function in functions.values():
        for _ in range(warmup):
            function()
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(rounds):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            gc.collect()
            wait()
            start = time.perf_counter()
            result = functions[name]()
            wait()
            seconds[name].append(time.perf_counter() - start)
            del result
        if after_round is not None:
            after_round(k + 1)
    return seconds


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


# ---------------------------------------------------------------------------------------------- the record of a run
def _git(*arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def cpu_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """The installed version of a package, None if it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a reader needs to repeat a run: command, commit, machine, versions, date."""
    import torch

    names = ("torch", "torchvision", "numpy", *packages)
    status = _git("status", "--porcelain")
    return {
        "command": shlex.join([Path(sys.executable).name, *_command()]),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def _command() -> list[str]:
    script = Path(sys.argv[0])
    if script.suffix == ".py" and script.parent.name == "bench":
        return ["-m", f"bench.{script.stem}", *sys.argv[1:]]
    return [script.name, *sys.argv[1:]]
