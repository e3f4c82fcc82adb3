"""What a measure adds to the prediction of later accuracy, out of sample."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from fastlr.display.sheets import Sheet
from fastlr.experiments.continual.fields import LEARNING_SPEED
from fastlr.experiments.continual.records import HORIZON, ContinualRun
from fastlr.experiments.continual.tables import hundred, label, order
from fastlr.experiments.runs.records import Array, all_measures, finite
from fastlr.experiments.statistics.bootstrap import LEVEL, deviation
from fastlr.experiments.statistics.correlation import straight

FEWEST = 4  # tasks to learn a line from, and blocks behind an interval
FOLDS = 5  # blocks of tasks, each predicted from the others


@dataclass(frozen=True)
class Prediction:
    """What a measure adds to predictions, out of sample, of the mean accuracy of the next 10 tasks.

    Attributes:
        measure: Its name.
        base: R^2 of task number (a line for each run), the mean accuracy of the last ten tasks and,
            where it was measured, learning speed, against each run's mean.
        gain: What R^2 gains by the measure (its logarithm, where positive).
        low: Lower end of the gain's 95 % interval by bootstrap of blocks: those of one seed at the
            same tasks are one.
        high: Its upper end.
        n: Tasks that are predicted.
    """

    measure: str
    base: float
    gain: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Series:
    """The tasks of a run.

    Attributes:
        seed: Seed of the run, or its name. Runs of one seed are resampled together.
        target: Mean accuracy of the next tasks ``[tasks]``.
        base: What is known without the measure ``[tasks, b]``.
        measure: The measure now ``[tasks]``.
    """

    seed: Hashable
    target: Array
    base: Array
    measure: Array

    @property
    def columns(self) -> Array:
        """Target, base and measure ``[tasks, 1 + b + 1]``."""
        return np.column_stack([self.target, self.base, self.measure])


@dataclass(frozen=True)
class Held:
    """The tasks of a run that lie in the block to be predicted.

    Attributes:
        seed: As in `Series`.
        columns: As in `Series`, without the run's lines over task number.
        total: Future accuracy without its mean over the tasks that were learned from.
    """

    seed: Hashable
    columns: Array
    total: Array


def predictions(
    runs: Sequence[ContinualRun], *, resamples: int = 1000, seed: int = 0
) -> list[Prediction]:
    """Predict future accuracy by nested least squares with and without each measure.

    The slopes are shared by all runs, and each of 5 blocks of tasks is predicted from the others.
    Tasks within 10 of the block are not learned from, as their targets overlap with it.

    Args:
        runs: Whose tasks are predicted.
        resamples: Number of resamples of the bootstrap of blocks.
        seed: Seed of that bootstrap.

    Returns:
        A prediction for each measure that has enough tasks, in the order of the tables.
    """
    targets = [run.future_accuracy() for run in runs]
    names = order(all_measures(runs))
    bases = [[recent_mean(run.accuracy)] for run in runs]
    if LEARNING_SPEED in names:
        for base, run in zip(bases, runs):
            base.append(run.measure(LEARNING_SPEED))
    found = []
    for name in names:
        if name == LEARNING_SPEED:
            continue
        measured = in_logarithms([run.measure(name) for run in runs])
        series = [
            Series(run.options.get("seed", run.name), target, np.column_stack(base), values)
            for run, target, base, values in zip(runs, targets, bases, measured)
        ]
        prediction = predict(name, series, resamples, seed)
        if prediction is not None:
            found.append(prediction)
    return found


def recent_mean(accuracy: Array, tasks: int = HORIZON) -> Array:
    """Return the mean of what is known of the last ``tasks`` accuracies at each task; else NaN."""
    means = np.full(len(accuracy), np.nan)
    for t in range(len(accuracy)):
        known = finite(accuracy[max(0, t + 1 - tasks) : t + 1])
        if len(known):
            means[t] = known.mean()
    return means


def in_logarithms(measured: Sequence[Array]) -> list[Array]:
    """Return the logarithms of a measure's values in several runs, if all known are positive."""
    if all((finite(values) > 0).all() for values in measured):
        return [np.log(values) for values in measured]
    return list(measured)


def predict(measure: str, series: Sequence[Series], resamples: int, seed: int) -> Prediction | None:
    """Compare the squared errors of both predictions; None if there are too few blocks."""
    squares: dict[Hashable, Array] = {}
    n = 0
    for fold in range(FOLDS):
        for held, errors in _errors_of_block(series, fold):
            squares.setdefault((held.seed, fold), np.zeros(3))
            squares[held.seed, fold] += errors
            n += len(held.total)
    blocks = np.array(list(squares.values()))  # [blocks, 3]
    if len(blocks) < FEWEST or not blocks[:, 2].sum():
        return None
    drawn = np.random.default_rng(seed).integers(0, len(blocks), (resamples, len(blocks)))
    without, with_measure, total = blocks[drawn].sum(1).T
    error = deviation((without - with_measure) / total, len(blocks))
    half = stdtrit(len(blocks) - 2, 1 - LEVEL / 2) * error
    without, with_measure, total = blocks.sum(0)
    gain = float((without - with_measure) / total)
    return Prediction(measure, float(1 - without / total), gain, gain - half, gain + half, n)


def _errors_of_block(series: Sequence[Series], fold: int) -> Iterator[tuple[Held, Array]]:
    """Yield each run's tasks in a block with three sums of squares.

    They are the errors of the prediction without the measure, of that with it, and the total.
    """
    longest = max(len(run.target) for run in series)
    start, stop = longest * fold // FOLDS, longest * (fold + 1) // FOLDS
    learned, block = [], []
    for run in series:
        columns = run.columns
        tasks = np.arange(len(columns), dtype=float)
        known = np.isfinite(columns).all(1)
        inside = known & (tasks >= start) & (tasks < stop)
        outside = known & ((tasks < start - HORIZON) | (tasks >= stop + HORIZON))
        if outside.sum() < FEWEST or not inside.any():
            continue
        lines = np.polyfit(tasks[outside], columns[outside], 1)
        without_trend = columns - np.stack([tasks, np.ones_like(tasks)], 1) @ lines
        to_learn = without_trend[outside]
        # What is a line but for rounding has nothing that could be learned from.
        to_learn[:, [straight(column, tasks[outside]) for column in columns[outside].T]] = 0.0
        learned.append(to_learn)
        target = columns[:, 0]
        total = target[inside] - target[outside].mean()
        block.append(Held(run.seed, without_trend[inside], total))
    if not block:
        return
    pooled = np.concatenate(learned)
    of_base = np.linalg.lstsq(pooled[:, 1:-1], pooled[:, 0], rcond=None)[0]
    of_all = np.linalg.lstsq(pooled[:, 1:], pooled[:, 0], rcond=None)[0]
    for held in block:
        target, known_now = held.columns[:, 0], held.columns[:, 1:]
        without = target - known_now[:, :-1] @ of_base
        with_measure = target - known_now @ of_all
        yield held, np.array([float(e @ e) for e in (without, with_measure, held.total)])


def prediction_sheet(predicted: Sequence[Prediction]) -> Sheet:
    """What each measure adds to the prediction of the next tasks' accuracy, out of sample."""
    title = f"Prediction out of sample: mean accuracy of the next {HORIZON} tasks"
    if not predicted:
        return Sheet("prediction", title, notes=("Too few tasks to predict some from others.",))
    columns = ("R2 x 100", "without", "gain", "95 % interval", "tasks")
    rows = []
    for p in predicted:
        interval = f"[{hundred(p.low, 2)}, {hundred(p.high, 2)}]"
        rows.append((label(p.measure), hundred(p.base), hundred(p.gain, 2), interval, str(p.n)))
    note = (
        f"without: from task number (a line for each run), the mean accuracy of the last {HORIZON} "
        "tasks and, where it was measured, accuracy after one epoch; gain: by the measure now (its "
        "logarithm where positive) besides. Least squares, slopes shared by all "
        f"runs; each of {FOLDS} blocks of tasks is predicted from the others, those within "
        f"{HORIZON} tasks of it left out. Negative: worse than without. Interval: bootstrap of "
        "blocks."
    )
    return Sheet("prediction", title, columns, rows, (note,))
