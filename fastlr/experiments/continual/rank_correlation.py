"""Rank correlation of local redundancy with accuracy, without any trend removed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastlr.experiments.continual.association import FREEDOM
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.runs.records import Array
from fastlr.experiments.statistics.bootstrap import (
    block_length,
    block_weights,
    interval,
    mean_over_runs,
)
from fastlr.experiments.statistics.correlation import (
    constant,
    correlation,
    resampled_spearman,
)

_LEADER = "local_redundancy"


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's correlation of local redundancy after task t with accuracy on task t + ``ahead``.

    No trend is removed.

    Mean over runs, weighted by tasks; the interval (95 %) is by moving-block bootstrap, NaN with
    fewer than 91 tasks in a single run, or 61 in each of several.
    """

    ahead: int
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    n: int = 0


def rank_correlation(
    runs: Sequence[ContinualRun], ahead: int, *, resamples: int = 1000, seed: int = 0
) -> RankCorrelation:
    """Correlate local redundancy with accuracy on the task just learned, or on the next.

    ``ahead`` is 0 for the task just learned, 1 for the next.
    """
    rng = np.random.default_rng(seed)
    parts: list[tuple[int, int, float, Array]] = []  # tasks, blocks, value, replicates
    for run in runs:
        x, y = run.measure(_LEADER)[: len(run) - ahead], run.accuracy[ahead:]
        known = np.isfinite(x) & np.isfinite(y)
        x, y = x[known], y[known]
        if len(x) < 3 or constant(x) or constant(y):
            continue
        length = min(block_length(len(x)), len(x))
        replicates = resampled_spearman(block_weights(len(x), length, resamples, rng), x, y)
        parts.append((len(x), -(-len(x) // length), correlation("spearman", x, y), replicates))
    n, blocks = sum(part[0] for part in parts), sum(part[1] for part in parts)
    if not parts:
        return RankCorrelation(ahead)
    value = sum(count / n * of_run for count, _, of_run, _ in parts)
    if blocks - 2 * len(parts) < FREEDOM:
        return RankCorrelation(ahead, value, n=n)
    replicates = mean_over_runs([part[3] for part in parts], [part[0] for part in parts])
    error = interval(value, replicates, blocks, len(parts))
    return RankCorrelation(ahead, value, error.low, error.high, n)


def describe(found: RankCorrelation) -> str:
    """Return a correlation in words, and whether it is significant."""
    if not math.isfinite(found.value):
        return "no rank correlation (values are missing or constant)"
    text = f"Spearman's rho {found.value:.2f}"
    if not math.isfinite(found.low):
        return f"{text} ({found.n} tasks are too few for an interval)"
    significant = found.low > 0 or found.high < 0
    return (
        f"{text} (95 % interval {found.low:.2f} to {found.high:.2f}, {found.n} tasks"
        f"{'' if significant else ', not significant'})"
    )
