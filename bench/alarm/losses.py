"""When a run has lost plasticity, by the accuracy of its tasks alone.

R is the highest mean of the non-overlapping blocks of twenty tasks that end before task t. A loss
is *declared* at the first t where the mean accuracy of tasks t to t + 9 is nearer to a guess than
to R (below a guess counts as nearer to it), and where half the distance from R to a guess is at
least four standard errors of a mean of ten tasks. Its *onset* is the first task s >= t at which the
mean of s to s + 2 is nearer to a guess than to R.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BLOCK = 20  # tasks of a block whose mean may be R
DECLARED_BY = 10  # tasks whose mean declares a loss
ONSET_BY = 3  # tasks whose mean is the onset
STANDARD_ERRORS = 4.0  # of a mean of DECLARED_BY tasks, that half the distance must be
EARLY = range(BLOCK, BLOCK + 3)  # losses declared at these tasks are shown apart
FIFTHS = 5
TOLERATED = 0.1  # of the first fifth's distance to a guess, by which the last may be lower

LOST, NOT_LOST, UNCLEAR, LOST_EARLY = "lost", "not lost", "unclear", "lost early"


@dataclass(frozen=True)
class Best:
    """The highest mean of a block of twenty tasks, and the deviation of its tasks.

    Attributes:
        mean: R.
        deviation: standard deviation of one task's accuracy within the block.
    """

    mean: float
    deviation: float


@dataclass(frozen=True)
class Loss:
    """A loss of plasticity.

    Attributes:
        declared: first task of the ten that declare it.
        onset: first task of the three that are nearer to a guess.
    """

    declared: int
    onset: int


def best_before(accuracy: Array, t: int) -> Best | None:
    """Return the best of the blocks that end before task t; None before the first has ended."""
    best: Best | None = None
    for start in range(0, t - BLOCK + 1, BLOCK):
        block = accuracy[start : start + BLOCK]
        mean = float(block.mean())
        if best is None or mean > best.mean:
            best = Best(mean, float(block.std(ddof=1)))
    return best


def is_clear(best: Best, guess: float) -> bool:
    """Return True if half the distance to a guess is large against the noise of ten tasks."""
    error = best.deviation / math.sqrt(DECLARED_BY)
    return (best.mean - guess) / 2 >= STANDARD_ERRORS * error and best.mean > guess


def find_loss(
    accuracy: Array,  # [tasks]
    guess: float,
) -> Loss | None:
    """Return the first loss of a run, None if none is declared.

    Args:
        accuracy: of each task, between 0 and 1.
        guess: accuracy of the best answer that does not look at the input.
    """
    tasks = len(accuracy)
    for t in range(BLOCK, tasks - DECLARED_BY + 1):
        best = best_before(accuracy, t)
        if best is None or not is_clear(best, guess):
            continue
        half = (best.mean + guess) / 2
        if accuracy[t : t + DECLARED_BY].mean() < half:
            return Loss(t, _onset(accuracy, t, half))
    return None


def _onset(accuracy: Array, declared: int, half: float) -> int:
    """Return the first task from the declared one on whose three tasks' mean is below ``half``.

    There is one among the ten: if no three in a row had a mean below it, nor had all of them
    (the last of the ten may be the first of its three).
    """
    for s in range(declared, len(accuracy) - ONSET_BY + 1):
        if accuracy[s : s + ONSET_BY].mean() < half:
            return s
    return len(accuracy) - ONSET_BY


def lost_nothing(accuracy: Array, guess: float) -> bool:
    """Return True if the last fifth is no lower than the first by more than is tolerated."""
    part = max(1, len(accuracy) // FIFTHS)
    first, last = float(accuracy[:part].mean()), float(accuracy[-part:].mean())
    return last >= first - TOLERATED * (first - guess)


def outcome(accuracy: Array, guess: float) -> str:
    """Return the group of a run: `LOST`, `NOT_LOST`, `LOST_EARLY` or `UNCLEAR`.

    Rings in unclear runs count neither way, and losses declared right after the first block are
    shown apart.
    """
    loss = find_loss(accuracy, guess)
    if loss is not None:
        return LOST_EARLY if loss.declared in EARLY else LOST
    return NOT_LOST if lost_nothing(accuracy, guess) else UNCLEAR


def share_declared(runs: Sequence[Array], guess: float) -> float:
    """Return the share of runs in which a loss is declared; NaN of no runs."""
    if not runs:
        return math.nan
    declared = [find_loss(accuracy, guess) is not None for accuracy in runs]
    return sum(declared) / len(declared)


def shuffled(accuracy: Array, seed: int) -> Array:
    """Return the accuracies of a run in random order: what time did to them is gone."""
    return np.random.default_rng(seed).permutation(accuracy)
