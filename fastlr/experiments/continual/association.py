"""Table 1: how each measure goes with what comes after it, the task number regressed out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from fastlr.errors import InputError
from fastlr.experiments.continual.records import HORIZON, ContinualRun
from fastlr.experiments.runs.records import Array, all_measures, logarithm
from fastlr.experiments.statistics.bootstrap import (
    SHORTEST_BLOCK,
    block_length,
    block_weights,
    deviation,
    interval,
    mean_over_runs,
)
from fastlr.experiments.statistics.correlation import (
    Resampled,
    constant,
    correlation,
    residuals,
    straight,
)

# Tasks of a run: three blocks, of which its level and slope take two.
FEWEST = SHORTEST_BLOCK * 2 + 1
FREEDOM = 2  # blocks beyond those two that all runs must have together: four blocks in a single run
KINDS = ("semi-partial", "partial")
METHODS = ("pearson", "spearman")
TRANSFORMS = ("raw", "log")
_LEADER = "local_redundancy"


class Target(NamedTuple):
    """What measures are correlated with.

    Attributes:
        label: In words.
        definition: With the tasks that it is of.
        table: Number of the paper's table.
        series: (run, horizon) to its values by task.
    """

    label: str
    definition: str
    table: int
    series: Callable[[ContinualRun, int], Array]


TARGETS = {
    "future accuracy": Target(
        "accuracy of the next 10 tasks",
        "the mean accuracy of the next 10 tasks",
        1,
        ContinualRun.future_accuracy,
    ),
    "forgetting": Target(
        "forgetting",
        "forgetting (of this task by the next)",
        2,
        lambda run, _horizon: run.forgetting,
    ),
}


@dataclass(frozen=True)
class Correlation:
    """The correlation of a measure with a target, task number regressed out.

    Several runs: the mean of the runs' correlations, weighted by tasks; resampled within each run.

    Attributes:
        measure: Name of the measure.
        target: "future accuracy" (mean of the next 10 tasks) or "forgetting" (of this task by the
            next).
        kind: "semi-partial" (the trend is removed from the target alone; the paper's) or "partial"
            (from both).
        method: "pearson" or "spearman".
        transform: "raw" or "log", of the measure.
        value: The correlation; NaN where it does not exist (a constant measure, the logarithm of
            zero).
        stderr: Its standard error, by block bootstrap.
        low: Lower end of the 95 % confidence interval.
        high: Upper end.
        naive: 1 / sqrt(n), which takes neighbouring tasks for independent.
        smallest: The smallest correlation that these runs find with probability 80 % (two-sided, 5
            %).
        n: Tasks that count, of all runs.
        blocks: Blocks that make up a resample.
        length: Tasks a block.
        per_run: The value of each run that has one.
        note: Why there is no value.
        lead: Local redundancy's value minus this one, of the same kind, method and transform;
            NaN unless both are of the same runs.
        lead_stderr: Its standard error, from the same resamples.
    """

    measure: str
    target: str
    kind: str
    method: str
    transform: str
    value: float = math.nan
    stderr: float = math.nan
    low: float = math.nan
    high: float = math.nan
    naive: float = math.nan
    smallest: float = math.nan
    n: int = 0
    blocks: int = 0
    length: int = 0
    per_run: tuple[float, ...] = ()
    note: str = ""
    lead: float = math.nan
    lead_stderr: float = math.nan


@dataclass(frozen=True)
class TooShort:
    """Says that runs have too few tasks for a correlation with a valid standard error.

    ``str`` of it is a sentence for the user.
    """

    target: str
    counts: dict[str, int]
    fewest: int = FEWEST

    def __str__(self) -> str:
        runs = ", ".join(f"{name} has {n}" for name, n in self.counts.items())
        end = ""
        if self.target == "future accuracy":
            end = f" ({HORIZON} more must follow the last one)"
        return (
            f"Too short for correlations with {self.target}: {runs} usable tasks, and a block "
            f"bootstrap needs at least {SHORTEST_BLOCK * (FREEDOM + 1) + 1} in a single run, or "
            f"{self.fewest} in each of several{end}."
        )


def correlations(
    runs: Sequence[ContinualRun],
    measures: Sequence[str] | None = None,
    target: str = "future accuracy",
    *,
    resamples: int = 1000,
    seed: int = 0,
    horizon: int = HORIZON,
    length: int | None = None,
    fewest: int = FEWEST,
) -> list[Correlation] | TooShort:
    """Correlate measures at the boundary after task t with what follows, task number regressed out.

    For "future accuracy" the target is the mean accuracy of tasks t + 1 .. t + horizon; for
    "forgetting" it is what task t's accuracy loses by training on task t + 1. Trends are linear in
    task number, removed by least squares; in the bootstrap they are fitted anew to each resample.
    All measures are resampled with the same blocks.

    Args:
        runs: At least one.
        measures: Names; None takes all that were recorded.
        target: "future accuracy" or "forgetting".
        resamples: Number of resamples of the bootstrap.
        seed: Seed of the bootstrap.
        horizon: Tasks whose accuracy is averaged.
        length: Tasks a block; None takes
            :func:`fastlr.experiments.statistics.bootstrap.block_length`, at least 30.
        fewest: Runs with fewer usable tasks are left out.

    Returns:
        For each measure both kinds, methods and transforms; TooShort where the runs do not make up
        enough blocks: 91 tasks in a single run, or 61 in each of several.

    Raises:
        InputError: No runs, an unknown target, a block that does not fit, or fewer than 2
            resamples.

    Source: paper, section 4.1, Table 1 and, of forgetting, Table 2.
    """
    if not runs:
        raise InputError("no runs to correlate")
    if target not in TARGETS:
        raise InputError(f"unknown target {target!r}: choose one of {', '.join(TARGETS)}")
    names = all_measures(runs) if measures is None else measures
    targets = [TARGETS[target].series(run, horizon) for run in runs]
    usable = [int(np.isfinite(values).sum()) for values in targets]
    spans = {}
    for index, n in enumerate(usable):
        if n >= fewest:
            spans[index] = _span(targets[index], length, horizon)
    if sum(span.blocks - 2 for span in spans.values()) < FREEDOM:
        return TooShort(target, {run.name: n for run, n in zip(runs, usable)}, fewest)

    parts: dict[_Key, list[_Part | str]] = {}
    for index, span in spans.items():
        rng = np.random.default_rng([seed, index])
        weights = block_weights(span.stop - span.start, span.length, resamples, rng)
        for key, part in _one_run(runs[index], targets[index], names, span, weights, fewest):
            parts.setdefault(key, []).append(part)
    pooled = {key: _pooled(target, key, of_runs) for key, of_runs in parts.items()}
    return [_with_lead(_leader_of(key, parts, pooled), *entry) for key, entry in pooled.items()]


_Key = tuple[str, str, str, str]  # measure, kind, method, transform


@dataclass(frozen=True)
class _Span:
    """The tasks ``start`` .. ``stop`` - 1 of a run, which have a target, and the tasks a block."""

    start: int
    stop: int
    length: int

    @property
    def blocks(self) -> int:
        """Blocks that make up a resample."""
        return -(-(self.stop - self.start) // self.length)


@dataclass(frozen=True)
class _Part:
    """A correlation within one run, and in its resamples."""

    value: float
    replicates: Array
    n: int
    span: _Span


def _span(target: Array, length: int | None, horizon: int) -> _Span:
    known = np.flatnonzero(np.isfinite(target))
    start, stop = int(known[0]), int(known[-1]) + 1
    if length is not None and not 1 <= length <= stop - start:
        raise InputError(f"blocks of {length} tasks cannot be drawn from {stop - start}")
    if length is None:
        length = min(block_length(stop - start, horizon), (stop - start) // 2)
    return _Span(start, stop, length)


def _one_run(
    run: ContinualRun,
    target: Array,  # [tasks]
    names: Sequence[str],
    span: _Span,
    weights: Array,  # [resamples, tasks of the span]
    fewest: int,
) -> Iterator[tuple[_Key, _Part | str]]:
    """Yield the correlations of one run's measures, or the reason why there is none."""
    target = target[span.start : span.stop]
    prepared: dict[bytes, Resampled] = {}  # measures that were recorded at the same tasks share it
    for name in names:
        raw = run.measure(name)[span.start : span.stop]
        known = np.isfinite(raw) & np.isfinite(target)
        task = np.arange(span.start, span.stop, dtype=np.float64)[known]
        for transform, kind in product(TRANSFORMS, KINDS):
            partial = kind == "partial"
            x = raw[known] if transform == "raw" else logarithm(raw[known])
            reason = _why_none(x, task, partial, fewest)
            if not reason and straight(target[known], task):
                reason = "what it should predict is a straight line in task number"
            mask = known.tobytes()
            if not reason and mask not in prepared:
                prepared[mask] = Resampled(weights[:, known], task, target[known])
            for method in METHODS:
                found: _Part | str = reason
                if not reason:
                    of_it = residuals(x, task) if partial else x
                    value = correlation(method, of_it, residuals(target[known], task))
                    replicates = getattr(prepared[mask], method)(x, partial=partial)
                    found = _Part(value, replicates, len(x), span)
                yield (name, kind, method, transform), found


def _why_none(x: Array, task: Array, partial: bool, fewest: int) -> str:
    """Say why a measure has no correlation; return the empty string if it has one.

    ``x`` is NaN where the measure has no logarithm.
    """
    if len(x) < fewest:
        return f"recorded at {len(x)} usable tasks only, fewer than {fewest}"
    if np.isnan(x).any():
        return "no logarithm: it is zero or negative at times"
    if constant(x):
        return "constant"
    return "a straight line in task number" if partial and straight(x, task) else ""


def _which(of_runs: Sequence[_Part | str]) -> list[bool]:
    """Return which of the runs have a correlation."""
    return [isinstance(part, _Part) for part in of_runs]


def _leader_of(
    key: _Key,
    parts: Mapping[_Key, Sequence[_Part | str]],
    pooled: Mapping[_Key, tuple[Correlation, Array]],
) -> tuple[Correlation, Array] | None:
    """Return local redundancy's correlation beside that of a key; None if of other runs."""
    leading = (_LEADER, *key[1:])
    if leading not in parts or _which(parts[leading]) != _which(parts[key]):
        return None
    return pooled[leading]


def _pooled(target: str, key: _Key, of_runs: Sequence[_Part | str]) -> tuple[Correlation, Array]:
    """Average over runs, weighted by their tasks; replicates are averaged in the same way."""
    measure, kind, method, transform = key
    none = Correlation(measure, target, kind, method, transform)
    parts = [part for part in of_runs if isinstance(part, _Part)]
    if not parts:
        return replace(none, note=str(of_runs[0])), np.empty(0)
    n = sum(part.n for part in parts)
    blocks = sum(part.span.blocks for part in parts)
    value = sum(part.n / n * part.value for part in parts)
    replicates = mean_over_runs([part.replicates for part in parts], [part.n for part in parts])
    pooled = replace(
        none,
        value=value,
        **vars(interval(value, replicates, blocks, len(parts))),
        naive=1 / math.sqrt(n),
        n=n,
        blocks=blocks,
        length=max(part.span.length for part in parts),
        per_run=tuple(part.value for part in parts),
    )
    return pooled, replicates


def _with_lead(
    leader: tuple[Correlation, Array] | None, other: Correlation, replicates: Array
) -> Correlation:
    """Add how far local redundancy leads; ``leader`` is None unless it is of the same runs."""
    if leader is None or leader[0].measure == other.measure:
        return other
    ahead, replicates_ahead = leader
    runs = len(other.per_run)
    if not runs:
        return other
    spread = deviation(replicates_ahead - replicates, other.blocks, runs)
    return replace(other, lead=ahead.value - other.value, lead_stderr=spread)
