"""Clocks: repeated calls on a device, interleaved rounds, quantiles, peak memory. The device is an argument throughout."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1) by linear interpolation between order statistics."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(seconds: Sequence[float], name: str = "seconds") -> dict[str, float]:
    """Median, 20 % and 80 % quantile and how many there were, under ``name``, ``name_p20``, ``name_p80``, ``repeats``."""
    return {
        name: statistics.median(seconds),
        f"{name}_p20": quantile(seconds, 0.2),
        f"{name}_p80": quantile(seconds, 0.8),
        "repeats": len(seconds),
    }


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


class Timer(Protocol):
    """Times short calls.

    Attributes:
        how: in words, for the record.
    """

    how: str

    def seconds(self, calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
        """Seconds of one call, ``repeats`` times: each is the mean over one pass through all ``calls``."""


class HostTimer:
    """The clock of the host: for a CPU."""

    how = "host clock"

    def seconds(self, calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
        """See :class:`Timer`."""
        for call in calls:
            call()
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            for call in calls:
                call()
            found.append((time.perf_counter() - start) / len(calls))
        return found


class CudaTimer:
    """Events around the replays of a CUDA graph of the calls, so that launching them costs nothing.

    Results are kept until all calls are captured: each writes to memory of its own, and none to what is in the cache.
    Calls that cannot be captured are launched one after the other between the events; ``how`` says so.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.how = device, "events around replays of a CUDA graph"

    def seconds(self, calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
        """See :class:`Timer`."""
        with torch.cuda.device(self.device):
            for call in calls:  # compiles kernels, makes handles
                call()
            run = self._captured(calls)
            run()
            torch.cuda.synchronize()
            pairs = []
            for _ in range(repeats):
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                run()
                pair[1].record()
                pairs.append(pair)
            torch.cuda.synchronize()
        return [first.elapsed_time(last) / 1000 / len(calls) for first, last in pairs]

    def _captured(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        graph, held = torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    held.append(call())
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.how = f"events around launches, as no graph could be captured: {first_line(error)}"
            return lambda: [call() for call in calls]
        self.how = "events around replays of a CUDA graph"
        return lambda: _replay(graph, held)


def _replay(graph: torch.cuda.CUDAGraph, held: list[Any]) -> None:
    """Replay; ``held`` are the results, kept for as long as this can be called."""
    graph.replay()


def timer_for(device: torch.device) -> Timer:
    """The timer of a device."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def waiter(device: torch.device) -> Callable[[], None]:
    """What waits until a device has done its work."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


def release(device: torch.device) -> None:
    """Give back what is no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(function: Callable[[], Any], device: torch.device) -> tuple[Any, int | None]:
    """Call the function: (its result, the most bytes of tensors during the call above those before it).

    None on a CPU, where the allocator does not tell.
    """
    if device.type != "cuda":
        return function(), None
    release(device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = function()
    torch.cuda.synchronize(device)
    return result, torch.cuda.max_memory_allocated(device) - before


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory; a guess where the device does not tell."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20
    return 32 << 20


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    text = lines[0][:300] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
