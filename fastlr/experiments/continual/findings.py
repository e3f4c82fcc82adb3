"""What continual runs show, in sentences made of their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastlr.display.record import counted
from fastlr.display.verdict import PARTS, brief
from fastlr.experiments.continual.association import FREEDOM, Correlation, TooShort
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.continual.tables import hundred
from fastlr.experiments.runs.records import Array, finite
from fastlr.experiments.statistics.bootstrap import (
    block_length,
    block_weights,
    interval,
    mean_error,
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


def findings(
    runs: Sequence[ContinualRun],
    future: list[Correlation] | TooShort,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> list[str]:
    """Say how accuracy and local redundancy went, and how the one goes with the other.

    Args:
        runs: The runs of a report.
        future: Their correlations with future accuracy.
        resamples: Of the bootstraps.
        seed: Of the bootstraps.
    """
    sentences = [course(runs)]
    if any(_LEADER in run.measures for run in runs):
        same, following = (
            rank_correlation(runs, ahead, resamples=resamples, seed=seed) for ahead in (0, 1)
        )
        sentences.append(
            "Local redundancy after a task against the accuracy of that same task: "
            f"{describe(same)}; of the next task: {describe(following)}."
        )
        sentences.append(_beyond_trend(future))
    return sentences


def course(runs: Sequence[ContinualRun]) -> str:
    """Say how accuracy and local redundancy changed from the first to the last fifth of the tasks.

    Example: "Over 200 tasks accuracy went from 51.2 ± 7.3 % (first fifth) to 12.9 ± 0.2 % (last
    fifth), local redundancy, by its median, from 650 to 1.9."
    """
    longest = max(len(run) for run in runs)
    text = f"Over {counted(longest, 'task')}"
    if longest < PARTS:
        return f"{text}: too few to compare the first with the last."
    accuracy = [ends(run.accuracy) for run in runs]
    first, last = (np.concatenate([finite(both[k]) for both in accuracy]) for k in (0, 1))
    told = []
    if len(first) and len(last):
        told.append(
            f"accuracy went from {percent(first)} (first fifth) to {percent(last)} (last fifth)"
        )
    measured = [ends(run.measure(_LEADER)) for run in runs]
    first, last = (np.concatenate([finite(both[k]) for both in measured]) for k in (0, 1))
    if len(first) and len(last):
        told.append(
            f"local redundancy, by its median, from {brief(np.median(first))} to "
            f"{brief(np.median(last))}"
        )
    return (
        f"{text} {', '.join(told)}."
        if told
        else f"{text} neither accuracy nor local redundancy was recorded."
    )


def ends(values: Array) -> tuple[Array, Array]:
    """Return the first and the last fifth of a series."""
    part = max(1, len(values) // PARTS)
    return values[:part], values[-part:]


def percent(values: Array) -> str:
    """Return the mean of shares with its standard error, in per cent."""
    error = mean_error(values)
    return f"{hundred(float(values.mean()))}{f' ± {hundred(error)}' if error > 0 else ''} %"


def describe(found: RankCorrelation) -> str:
    """Return a correlation in words, or that it cannot be told."""
    if not math.isfinite(found.value):
        return "there is no correlation to tell (one of them is missing or constant)"
    text = f"Spearman's rho {found.value:.2f}"
    if not math.isfinite(found.low):
        return f"{text}, which cannot be told from chance by these {found.n} tasks"
    text += f" (95 % interval {found.low:.2f} to {found.high:.2f}, {found.n} tasks)"
    return text if found.low > 0 or found.high < 0 else f"{text}, which cannot be told from 0"


def _beyond_trend(future: list[Correlation] | TooShort) -> str:
    """Say what is left of it where the trend is taken out, as the paper's Table 1 does."""
    what = (
        "With the accuracy of the next 10 tasks, the trend in task number taken out (the paper's "
        "Table 1)"
    )
    if isinstance(future, TooShort):
        return f"{what}, it cannot be told from so few tasks."
    chosen = (
        c.measure == _LEADER and c.kind == "semi-partial" and c.transform == "raw" for c in future
    )
    found = next((c for c, of_it in zip(future, chosen) if of_it and c.method == "pearson"), None)
    if found is None or not math.isfinite(found.value):
        return f"{what}, there is no correlation to tell."
    if not math.isfinite(found.stderr):
        return f"{what}: r = {found.value:.2f}, whose error is not known."
    text = f"{what}: r = {found.value:.2f} ± {found.stderr:.2f}"
    if found.low > 0 or found.high < 0:
        return f"{text}."
    return (
        f"{text}, which cannot be told from 0: only one beyond {found.smallest:.2f} would be found "
        "with probability 80 %."
    )
