"""Table 1: how each measure goes with what comes after it, the task number regressed out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastlr.analysis import correlation
from fastlr.analysis.bootstrap import SHORTEST_BLOCK, block_length, block_weights, deviation, interval
from fastlr.analysis.runs import HORIZON, Run
from fastlr.errors import InputError

Array = NDArray[np.float64]
FEWEST = SHORTEST_BLOCK * 2 + 1  # tasks of a run: three blocks, of which its level and slope take two
FREEDOM = 2  # blocks beyond those two that all runs must have together: four blocks in a single run
KINDS = ("semi-partial", "partial")
METHODS = ("pearson", "spearman")
TRANSFORMS = ("raw", "log")
TARGETS = ("future accuracy", "forgetting")
_LEADER = "local_redundancy"


@dataclass(frozen=True)
class Correlation:
    """The correlation of a measure with a target, task number regressed out.

    Several runs: the mean of the runs' correlations, weighted by tasks; resampled within each run.

    Attributes:
        measure: Name of the measure.
        target: "future accuracy" (mean of the next 10 tasks) or "forgetting" (of this task by the next).
        kind: "semi-partial" (the trend is removed from the target alone; the paper's) or "partial" (from both).
        method: "pearson" or "spearman".
        transform: "raw" or "log", of the measure.
        value: The correlation; NaN where it does not exist (a constant measure, the logarithm of zero).
        stderr: Its standard error, by block bootstrap.
        low: Lower end of the 95 % confidence interval.
        high: Upper end.
        naive: 1 / sqrt(n), which takes neighbouring tasks for independent.
        smallest: The smallest correlation that these runs find with probability 80 % (two-sided, 5 %).
        n: Tasks that count, of all runs.
        blocks: Blocks that make up a resample.
        length: Tasks a block.
        per_run: The value of each run.
        note: Why there is no value.
        lead: Local redundancy's value minus this one, of the same kind, method and transform.
        lead_stderr: Its standard error, from the same resamples.
    """

    measure: str
    target: str
    kind: str
    method: str
    transform: str
    value: float
    stderr: float
    low: float
    high: float
    naive: float
    smallest: float
    n: int
    blocks: int
    length: int
    per_run: tuple[float, ...]
    note: str = ""
    lead: float = math.nan
    lead_stderr: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """All of it as a flat dict."""
        return asdict(self)


@dataclass(frozen=True)
class TooShort:
    """Runs with too few tasks for a correlation with an honest error; ``str`` of it is a sentence."""

    target: str
    counts: dict[str, int]
    fewest: int = FEWEST

    def __str__(self) -> str:
        runs = ", ".join(f"{name} has {n}" for name, n in self.counts.items())
        end = f" ({HORIZON} more must follow the last one)" if self.target == TARGETS[0] else ""
        one = SHORTEST_BLOCK * (FREEDOM + 1) + 1
        return (
            f"Too short for correlations with {self.target}: {runs} usable tasks, and a block bootstrap needs at least "
            f"{one} in a single run, or {self.fewest} in each of several{end}."
        )


def correlations(
    runs: Sequence[Run],
    measures: Sequence[str] | None = None,
    target: str = "future accuracy",
    *,
    resamples: int = 1000,
    seed: int = 0,
    horizon: int = HORIZON,
    length: int | None = None,
    fewest: int = FEWEST,
) -> list[Correlation] | TooShort:
    """Correlate measures at the boundary after task t with what follows it, task number regressed out.

    For "future accuracy" the target is the mean accuracy of tasks t + 1 .. t + horizon; for "forgetting" it is what task
    t's accuracy loses by training on task t + 1. Trends are linear in task number, removed by least squares; in the
    bootstrap they are fitted anew to each resample. All measures are resampled with the same blocks.

    Args:
        runs: At least one.
        measures: Names; None takes all that were recorded.
        target: "future accuracy" or "forgetting".
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
        horizon: Tasks whose accuracy is averaged.
        length: Tasks a block; None takes :func:`fastlr.analysis.bootstrap.block_length`, at least 30.
        fewest: Runs with fewer usable tasks are left out.

    Returns:
        For each measure both kinds, methods and transforms; TooShort where the runs do not make up enough blocks: 91
        tasks in a single run, or 61 in each of several.

    Raises:
        InputError: No runs, an unknown target, or a block that does not fit.

    Source: paper, section 4.1, Tables 1 and 2.
    """
    if not runs:
        raise InputError("no runs to correlate")
    if target not in TARGETS:
        raise InputError(f"unknown target {target!r}: choose one of {', '.join(TARGETS)}")
    names = list(measures) if measures is not None else list(dict.fromkeys(m for run in runs for m in run.measures))
    targets = [run.future_accuracy(horizon) if target == TARGETS[0] else run.forgetting for run in runs]
    usable = [int(np.isfinite(each).sum()) for each in targets]
    plan = {i: _span(y, length, horizon) for i, y in enumerate(targets) if usable[i] >= fewest}
    if sum(-(-(last - first) // size) - 2 for first, last, size in plan.values()) < FREEDOM:
        return TooShort(target, {run.name: n for run, n in zip(runs, usable)}, fewest)

    pieces: dict[tuple[str, str, str, str], list[_Piece | str]] = {}
    for index, (run, y) in enumerate(zip(runs, targets)):
        if index not in plan:
            continue
        rng = np.random.default_rng([seed, index])
        for key, piece in _one_run(run, y, names, resamples, rng, plan[index], fewest):
            pieces.setdefault(key, []).append(piece)
    pooled = {key: _pooled(target, key, each) for key, each in pieces.items()}
    return [_against(pooled.get((_LEADER, *key[1:])), each) for key, each in pooled.items()]


@dataclass(frozen=True)
class _Piece:
    """A correlation within one run."""

    value: float
    replicates: Array
    n: int
    blocks: int
    length: int


def _span(y: Array, length: int | None, horizon: int) -> tuple[int, int, int]:
    """The first task with a target, one more than the last, and the tasks a block."""
    known = np.flatnonzero(np.isfinite(y))
    first, last = int(known[0]), int(known[-1]) + 1
    if length is not None and not 1 <= length <= last - first:
        raise InputError(f"blocks of {length} tasks cannot be drawn from {last - first}")
    return first, last, length or min(block_length(last - first, horizon), (last - first) // 2)


def _one_run(
    run: Run,
    y: Array,
    names: Sequence[str],
    resamples: int,
    rng: np.random.Generator,
    span: tuple[int, int, int],
    fewest: int,
) -> Iterator[tuple[tuple[str, str, str, str], _Piece | str]]:
    """Yield (measure, kind, method, transform) and its piece, or the reason why there is none."""
    first, last, size = span
    weights = block_weights(last - first, size, resamples, rng)
    prepared: dict[bytes, correlation.Resampled] = {}
    for name in names:
        raw = run.measure(name)[first:last]
        for transform in TRANSFORMS:
            x, known, reason = raw, np.isfinite(raw) & np.isfinite(y[first:last]), ""
            if transform == "log":
                reason = "no logarithm: it is zero or negative at times" if (raw[known] <= 0).any() else ""
                with np.errstate(invalid="ignore", divide="ignore"):
                    x = np.log(raw)
            if known.sum() < fewest:
                reason = f"recorded at {int(known.sum())} usable tasks only, fewer than {fewest}"
            elif not reason and correlation.constant(x[known]):
                reason = "constant"
            task = np.arange(first, last, dtype=np.float64)[known]
            target = y[first:last][known]
            if not reason and (mask := known.tobytes()) not in prepared:
                prepared[mask] = correlation.Resampled(weights[:, known], task, target)
            for kind in KINDS:
                partial = kind == "partial"
                if not reason and partial and correlation.straight(x[known], task):
                    reason = "a straight line in task number"
                a = correlation.residuals(x[known], task) if partial and not reason else x[known]
                b = correlation.residuals(target, task) if not reason else target
                for method in METHODS:
                    key = (name, kind, method, transform)
                    if reason:
                        yield key, reason
                        continue
                    value = getattr(correlation, method)(a, b)
                    replicates = getattr(prepared[mask], method)(x[known], partial=partial)
                    yield key, _Piece(value, replicates, len(a), -(-(last - first) // size), size)


def _pooled(target: str, key: tuple[str, str, str, str], found: Sequence[_Piece | str]) -> tuple[Correlation, Array]:
    """Average over runs, weighted by their tasks; replicates are averaged in the same way."""
    name, kind, method, transform = key
    pieces = [piece for piece in found if isinstance(piece, _Piece)]
    if not pieces:
        nothing = (math.nan,) * 6
        none = Correlation(name, target, kind, method, transform, *nothing, 0, 0, 0, (), str(found[0]))
        return none, np.empty(0)
    n = sum(piece.n for piece in pieces)
    value = sum(piece.n / n * piece.value for piece in pieces)
    replicates = sum((piece.n / n * piece.replicates for piece in pieces), np.zeros(len(pieces[0].replicates)))
    blocks = sum(piece.blocks for piece in pieces)
    error = interval(value, replicates, blocks, len(pieces))
    result = Correlation(
        name,
        target,
        kind,
        method,
        transform,
        value,
        error.stderr,
        error.low,
        error.high,
        1 / math.sqrt(n),
        error.smallest,
        n,
        blocks,
        max(piece.length for piece in pieces),
        tuple(piece.value for piece in pieces),
    )
    return result, replicates


def _against(leader: tuple[Correlation, Array] | None, each: tuple[Correlation, Array]) -> Correlation:
    """Add how far local redundancy leads, if it was measured in the same runs."""
    (other, theirs), runs = each, len(each[0].per_run)
    if leader is None or leader[0].measure == other.measure or not runs or len(leader[0].per_run) != runs:
        return other
    first, ours = leader
    spread = deviation(ours - theirs, other.blocks, runs)
    return replace(other, lead=first.value - other.value, lead_stderr=spread)
