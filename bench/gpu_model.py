"""The constants of the model that predicts a launch's time, and its three terms.

A launch takes the largest of three times, and a gap to the next one:

- by *issue*: all instructions of all warps, over the issue slots of all multiprocessors;
- by *latency*: the cycles that a warp alone takes through its program, for as many rounds as the
  programs make of those that are resident at once; a load takes the mean of the latencies of
  memory, of the second cache and of the first, by the bytes that come from each (`load_latency`);
- by *DRAM*: every tensor that it touches, once, over the bandwidth.

The constants are frozen: a table of a later commit is to differ from an earlier one by what the
kernels do alone. They were set before any result was seen to fit or not. An H200 took twice what
they give for ResNet-50: bench/results/h200. What the model does not know: rates of single units
(integer arithmetic has half the issue slots on compute capability 9.0, double precision half,
shared memory 32 lanes a cycle), conflicts of banks, caches, and that latency grows with traffic. So
a time is a lower bound of what such a program takes, more than a forecast.
"""

from __future__ import annotations

from typing import NamedTuple

ISSUES = 4  # instructions that a multiprocessor issues in a cycle
ISSUE_SHARE = 0.8  # of the slots that a good kernel fills
BANDWIDTH_SHARE = 0.85  # of the vendor's figure that a good kernel reaches
GAP = 1.5e-6  # seconds that a launch in a CUDA graph costs beside its work


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        architecture: compute capability, 90 for 9.0.
        multiprocessors: how many.
        clock: under load, cycles a second.
        bandwidth: of memory, bytes a second, the vendor's figure.
    """

    architecture: int
    multiprocessors: int
    clock: float
    bandwidth: float


GPUS = {
    "a100": Gpu(80, 108, 1.41e9, 2.0e12),
    "h100": Gpu(90, 132, 1.7e9, 3.35e12),
    "h200": Gpu(90, 132, 1.7e9, 4.8e12),
    "b200": Gpu(100, 148, 1.7e9, 8.0e12),
}

# Cycles until a result is there, by kind of instruction, where the assembler has the program wait
# for a scoreboard. Those of memory were measured without other traffic on an H100 by Luo et al.
# 2024 (arXiv:2402.13499, "Latency clocks at different memory levels"); the rest are round numbers.
FIRST_CACHE, SHARED, SECOND_CACHE, MEMORY, OTHER = 41, 29, 263, 479, 20
LATENCIES = {"LDS": SHARED, "LDSM": SHARED, "SHFL": SHARED, "HMMA": 33}
LOADS = ("LDG", "LDGSTS")
BARRIER = 20  # cycles from the last warp's arrival to going on
MATRIX_START = 32  # of an asynchronous product of a warp group, beside N / 2 cycles of work


class Terms(NamedTuple):
    """The seconds that a launch takes by issue, by latency and by DRAM."""

    issue: float
    latency: float
    dram: float

    @property
    def seconds(self) -> float:
        """The largest, and the gap to the next launch."""
        return max(self) + GAP

    @property
    def bound(self) -> str:
        """The name of the largest."""
        return self._fields[self.index(max(self))]


def dram_seconds(touched: float, gpu: Gpu) -> float:
    """Time to move so many bytes between memory and multiprocessors."""
    return touched / (BANDWIDTH_SHARE * gpu.bandwidth)


def load_latency(asked: float, read: float, again: float) -> float:
    """Return the mean cycles that a load takes.

    Args:
        asked: bytes of all loads of all threads.
        read: bytes that they find in memory: each tensor once.
        again: bytes that other programs read too: from the second cache. All others were asked for
            by the same program before: from the first.
    """
    whole = max(asked, read + again, 1.0)
    near = whole - read - again
    return (read * MEMORY + again * SECOND_CACHE + near * FIRST_CACHE) / whole


def terms(
    instructions: float, cycles: float, programs: int, resident: int, touched: int, gpu: Gpu
) -> Terms:
    """Return the three times of a launch.

    Args:
        instructions: of all warps of a program.
        cycles: that a warp alone takes.
        programs: of the launch.
        resident: programs that a multiprocessor holds at once.
        touched: bytes, each tensor once.
        gpu: on which.
    """
    slots = gpu.multiprocessors * ISSUES * ISSUE_SHARE * gpu.clock
    rounds = max(1.0, programs / (gpu.multiprocessors * resident))
    return Terms(
        instructions * programs / slots,
        rounds * cycles / gpu.clock,
        dram_seconds(touched, gpu),
    )
