"""Tables beside the paper's Table 1: forgetting by blocks, costs, agreement of estimates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from fastlr.experiments.continual.fields import REFERENCE, SHAPES
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.runs.records import Array, all_measures, finite, logarithm
from fastlr.experiments.statistics.bootstrap import (
    block_length,
    block_weights,
    interval,
    mean_error,
    mean_over_runs,
)
from fastlr.experiments.statistics.correlation import constant, correlation, resampled_pearson

FEWEST_FOR_ERROR = 91  # boundaries: four blocks


@dataclass(frozen=True)
class ForgettingBlock:
    """Mean forgetting over the tasks ``first`` .. ``last`` (``last`` included), of all runs.

    Attributes:
        first: First task.
        last: Last task.
        n: Tasks that count: those with an accuracy right after training and after the next task.
        right_after: Mean accuracy right after training on the task.
        one_later: Mean accuracy on the same images after the next task.
        mean: Mean of their difference; positive is forgetting.
        stderr: Its standard error: by blocks of 30 tasks from 60 tasks on, else sd / sqrt(n); runs
            are independent.
    """

    first: int
    last: int
    n: int
    right_after: float
    one_later: float
    mean: float
    stderr: float


def forgetting_by_blocks(runs: Sequence[ContinualRun]) -> list[ForgettingBlock]:
    """Return the mean forgetting over all tasks, then over stretches of tasks of equal length.

    There are at most ten stretches, each of at least 10 tasks.

    Forgetting of task t is its accuracy right after training on it minus its accuracy after task t
    + 1.
    """
    longest = max(map(len, runs))
    size = max(10, -(-longest // 10))
    stretches = [(0, longest)]
    if longest > size:
        stretches += [(start, min(start + size, longest)) for start in range(0, longest, size)]
    found = [_forgetting(runs, start, stop) for start, stop in stretches]
    return [block for block in found if block is not None]


def _forgetting(runs: Sequence[ContinualRun], start: int, stop: int) -> ForgettingBlock | None:
    """Return the mean forgetting over the tasks ``start`` .. ``stop`` - 1; None if none counts."""
    right_after, lost = [], []
    for run in runs:
        values = run.forgetting[start:stop]
        known = np.isfinite(values)
        right_after.append(run.accuracy[start:stop][known])
        lost.append(values[known])
    n = sum(map(len, lost))
    if not n:
        return None
    accuracy = float(np.concatenate(right_after).mean())
    mean = float(np.concatenate(lost).mean())
    # NaN stays NaN.
    errors = [len(values) / n * mean_error(values) for values in lost if len(values)]
    stderr = math.sqrt(sum(error**2 for error in errors))
    return ForgettingBlock(start, stop - 1, n, accuracy, accuracy - mean, mean, stderr)


@dataclass(frozen=True)
class Cost:
    """Seconds of "train", "evaluate" or a measure, as timed within the runs.

    Attributes:
        name: What was timed.
        n: Tasks at which it was.
        total: Seconds, of all runs.
        mean: Seconds a task, over those at which it was timed.
        median: The same; first calls (planning, compiling) do not move it.
        share: Total over the seconds of training of all tasks of the same runs; NaN without them.
    """

    name: str
    n: int
    total: float
    mean: float
    median: float
    share: float


def costs(runs: Sequence[ContinualRun]) -> list[Cost]:
    """Return the costs of what was timed: "train", then the measures, the most expensive first.

    "evaluate" is among the measures.

    Source: paper, appendix A.5, Table 5.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.timed))
    result = []
    for name in names:
        timed = [run for run in runs if name in run.timed]
        by_task = np.concatenate([finite(run.seconds(name)) for run in timed])
        if not len(by_task):
            continue
        training = sum(float(finite(run.seconds("train")).sum()) for run in timed)
        total = float(by_task.sum())
        share = total / training if training > 0 else math.nan
        result.append(
            Cost(name, len(by_task), total, float(by_task.mean()), float(np.median(by_task)), share)
        )
    return sorted(result, key=lambda cost: (cost.name != "train", -cost.total))


@dataclass(frozen=True)
class Agreement:
    """How closely an estimate follows a reference over the boundaries at which both were taken.

    With x the estimate and y the reference; several runs: the mean of the runs' values, weighted by
    boundaries.

    Attributes:
        measure: Name of the estimate.
        transform: "raw" or "log".
        r: Pearson's correlation of x and y (no trend removed, as in the paper).
        stderr: Its standard error by block bootstrap; NaN below 91 boundaries.
        r_squared: r * r, the R^2 of the best straight line through the points.
        identity: 1 - sum (x - y)^2 / sum (y - mean y)^2, the R^2 of the line x = y; negative when
            the mean of y would be a better guess than x.
        squared_error: Mean of (x - y)^2, of the values or of their natural logarithms as
            ``transform`` says.
        mse: The same after each series is brought to mean 0 and standard deviation 1: 2 (1 - r).
        ratio: Geometric mean of x / y: how many times too large.
        n: Boundaries.
    """

    measure: str
    transform: str
    r: float
    stderr: float
    r_squared: float
    identity: float
    mse: float
    ratio: float
    n: int
    squared_error: float


def agreement(
    runs: Sequence[ContinualRun],
    reference: str = REFERENCE,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Agreement]:
    """Hold estimates on synthetic inputs to the one on real images of the next task.

    They are local_redundancy (shapes) and all local_redundancy_* that were recorded.

    Args:
        runs: Runs without the reference are left out.
        reference: Name of the reference measure.
        resamples: Number of resamples of the bootstrap behind the standard error.
        seed: Seed of the bootstrap.

    Returns:
        Each of them, raw and as logarithms; empty if the reference was not recorded.

    Source: paper, appendix A.4, Table 4, which gives no definitions of R^2 and MSE.
    """
    runs = [run for run in runs if reference in run.measures]
    candidates = [name for name in all_measures(runs) if _is_candidate(name, reference)]
    result = []
    for name, transform in product(candidates, ("raw", "log")):
        pairs = []
        for run in runs:
            x, y = run.measure(name), run.measure(reference)
            if transform == "log":
                x, y = logarithm(x), logarithm(y)
            known = np.isfinite(x) & np.isfinite(y)
            if known.sum() >= 3 and not constant(x[known]) and not constant(y[known]):
                pairs.append((x[known], y[known]))
        if pairs:
            result.append(_agree(name, transform, pairs, resamples, seed))
    return result


def _is_candidate(name: str, reference: str) -> bool:
    return name != reference and (name == SHAPES or name.startswith(f"{SHAPES}_"))


def _agree(
    name: str, transform: str, pairs: list[tuple[Array, Array]], resamples: int, seed: int
) -> Agreement:
    """Compare an estimate with the reference, the pairs of series of each run pooled."""
    n = sum(len(x) for x, _ in pairs)
    shares = np.array([len(x) / n for x, _ in pairs])
    of_runs = np.array([_agreement_of_run(x, y, transform) for x, y in pairs])
    r, identity, squared, log_ratio = map(float, (shares[:, None] * of_runs).sum(0))
    return Agreement(
        measure=name,
        transform=transform,
        r=r,
        stderr=_error(r, pairs, shares, resamples, seed),
        r_squared=r * r,
        identity=identity,
        squared_error=squared,
        mse=2 * (1 - r),
        ratio=math.exp(log_ratio),
        n=n,
    )


def _agreement_of_run(x: Array, y: Array, transform: str) -> tuple[float, float, float, float]:
    """Return a run's r, R^2 of the line x = y, mean squared error, and logarithm of the ratio."""
    squares = (x - y) ** 2
    identity = 1 - squares.sum() / ((y - y.mean()) ** 2).sum()
    logs = x - y if transform == "log" else logarithm(x) - logarithm(y)
    return correlation("pearson", x, y), identity, squares.mean(), logs.mean()


def _error(
    r: float, pairs: list[tuple[Array, Array]], shares: Array, resamples: int, seed: int
) -> float:
    if min(len(x) for x, _ in pairs) < FEWEST_FOR_ERROR:
        return math.nan
    replicates, blocks = [], 0
    for index, (x, y) in enumerate(pairs):
        length = min(block_length(len(x)), len(x) // 2)
        weights = block_weights(len(x), length, resamples, np.random.default_rng([seed, index]))
        replicates.append(resampled_pearson(weights, x, y))
        blocks += -(-len(x) // length)
    return interval(r, mean_over_runs(replicates, shares), blocks, len(pairs)).stderr
