"""Moving-block bootstrap: standard errors for series whose neighbours depend on each other.

Means over the next ten tasks overlap, and measures of a network change slowly, so neighbouring
tasks are no independent samples and 1 / sqrt(n) is too small. Blocks of consecutive tasks are drawn
instead of tasks (Künsch 1989, Ann. Statist. 17:1217), around the end of the run to its start
(Politis and Romano 1992): else tasks near the ends would be drawn less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastlr.errors import InputError

Array = NDArray[np.float64]
SHORTEST_BLOCK = 30
POWER, LEVEL = 0.80, 0.05


def block_length(tasks: int, horizon: int = 10) -> int:
    """Tasks a block: 2 sqrt(n), at least 30 and three times the horizon.

    Blocks must be long against the time in which a measure forgets its past (33 tasks at an
    autocorrelation of 0.97) and many. Simulated with such a measure and 3000 tasks, 95 % intervals
    cover 94 to 96 % at correlations of 0 and 0.26 (1000 runs;
    ``tests/experiments/continual/test_analysis.py``), those from blocks of 30 83 to 92 % (150
    runs).

    >>> block_length(200), block_length(500), block_length(3000)
    (30, 45, 110)
    """
    return max(SHORTEST_BLOCK, 3 * horizon, round(2 * math.sqrt(tasks)))


def block_weights(tasks: int, length: int, resamples: int, rng: np.random.Generator) -> Array:
    """Draw bootstrap resamples as numbers of times that each task occurs: ``[resamples, tasks]``.

    Each row sums to ``tasks``.

    Raises:
        InputError: A block longer than the run, or fewer than 2 resamples.
    """
    if not 1 <= length <= tasks:
        raise InputError(f"blocks of {length} tasks cannot be drawn from {tasks}")
    if resamples < 2:
        raise InputError(f"a bootstrap needs at least 2 resamples, not {resamples}")
    count = -(-tasks // length)
    starts = rng.integers(0, tasks, size=(resamples, count))
    lengths = np.full(count, length)
    lengths[-1] = tasks - length * (count - 1)
    changes = np.zeros((resamples, 2 * tasks + 1))
    row = np.arange(resamples)[:, None]
    np.add.at(changes, (row, starts), 1.0)
    np.add.at(changes, (row, starts + lengths), -1.0)
    covered = np.cumsum(changes, axis=1)[:, : 2 * tasks]
    return covered[:, :tasks] + covered[:, tasks:]


@dataclass(frozen=True)
class Interval:
    """A correlation's standard error and 95 % confidence interval.

    ``smallest`` is the smallest effect that would have been seen.
    """

    stderr: float = math.nan
    low: float = math.nan
    high: float = math.nan
    smallest: float = math.nan


def interval(value: float, replicates: Array, blocks: int, runs: int = 1) -> Interval:
    """Turn bootstrap replicates of a correlation into its error.

    On Fisher's scale z = atanh r: ``z +- t se_z`` with t the 97.5 % point of Student's distribution
    with ``blocks - 2 runs`` degrees of freedom (a level and a slope are fitted to each), and se_z
    the replicates' standard deviation times sqrt(blocks / (blocks - 2 runs)), the part that the fit
    to the sample has taken. The smallest effect is the correlation that a two-sided test at 5 %
    finds with probability 80 %: tanh((t + 0.84) se_z).

    Args:
        value: The correlation.
        replicates: Its value in each resample; NaN where it does not exist.
        blocks: Blocks that make up a resample, of all runs.
        runs: Runs that are averaged; each has its own level and slope.
    """
    # Its import takes a fifth of a second, for which no run that only trains shall wait.
    from scipy.special import ndtri, stdtrit

    if not math.isfinite(value) or not math.isfinite(deviation(replicates, blocks, runs)):
        return Interval()
    z = math.atanh(min(max(value, -1 + 1e-12), 1 - 1e-12))
    error = deviation(np.arctanh(np.clip(replicates, -1 + 1e-12, 1 - 1e-12)), blocks, runs)
    t = float(stdtrit(max(1, blocks - 2 * runs), 1 - LEVEL / 2))
    return Interval(
        stderr=deviation(replicates, blocks, runs),
        low=math.tanh(z - t * error),
        high=math.tanh(z + t * error),
        smallest=math.tanh((t + float(ndtri(POWER))) * error),
    )


def mean_over_runs(replicates: Sequence[Array], shares: ArrayLike) -> Array:
    """Average the replicates of several runs, each an array [resamples], by the runs' shares.

    A resample in which a run has no value, such as one of tasks that all ended at a guess, is
    averaged over the other runs. It is NaN where these have less than half of the shares.
    """
    values, share = np.stack(replicates), np.asarray(shares)[:, None]
    known = np.isfinite(values)
    total = (share * known).sum(0)
    mean = (share * np.where(known, values, 0.0)).sum(0) / np.maximum(total, share.min())
    return np.where(total >= share.sum() / 2, mean, math.nan)


def deviation(replicates: Array, blocks: int, runs: int = 1) -> float:
    """Return the standard deviation of replicates, times sqrt(blocks / (blocks - 2 runs)).

    See :func:`interval`.

    NaN if more than a tenth of them do not exist, or with fewer than two blocks a run.
    """
    known = replicates[np.isfinite(replicates)]
    if len(known) < max(2, 0.9 * len(replicates)) or blocks < 2 * runs:
        return math.nan
    return float(np.std(known, ddof=1)) * math.sqrt(blocks / max(1, blocks - 2 * runs))


def mean_error(values: Array, length: int = SHORTEST_BLOCK) -> float:
    """Return the standard error of the mean of a series, by circular blocks.

    With fewer than two blocks it is sd / sqrt(n); NaN for one value.

    The block bootstrap of a mean needs no drawing: its variance is that of the means of all blocks,
    over their number.
    """
    n = len(values)
    if n < 2:
        return math.nan
    if n < 2 * length:
        return float(np.std(values, ddof=1)) / math.sqrt(n)
    sums = np.cumsum(np.concatenate([[0.0], values, values[: length - 1]]))
    means = (sums[length:] - sums[:-length]) / length
    blocks = n / length
    return float(np.std(means)) / math.sqrt(blocks - 1)
