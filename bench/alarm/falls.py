"""What a value of local redundancy, or its fall, says of accuracy in the runs of the study."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from bench.alarm.choices import LEAD
from bench.alarm.losses import Array
from bench.alarm.problems import IMAGES
from bench.alarm.signals import Course
from fastlr.display.alarm import FIRST, REFERENCE, Flags
from fastlr.display.sheets import DASH, Sheet
from fastlr.experiments.continual.findings import ends

INPUTS = {
    "shapes": "local_redundancy",
    "images just learned": "local_redundancy_this_task",
    "images of the next task": "local_redundancy_next_task",
}
NEAR = 0.1  # share by which a value may differ from that of constant outputs
BEFORE = 20  # tasks before an onset
ALL_PROBLEMS = "all problems"


def falls_sheets(runs: Sequence[Course]) -> list[Sheet]:
    """Return the tables of values at that of constant outputs, of falls, and ahead of losses."""
    return [constant_sheet(runs), half_sheet(runs), onset_sheet(runs)]


def constant_sheet(runs: Sequence[Course]) -> Sheet:
    """How accurate networks are whose value is that of constant outputs."""
    rows = []
    for inputs, problem, of_it in _groups(runs):
        near, below = (
            np.concatenate([_accuracies(run, INPUTS[inputs], where) for run in of_it])
            for where in (_is_near, _is_below)
        )
        readings = sum(int((run.read_at >= FIRST).sum()) for run in of_it)
        cells = (*_mean_and_highest(near), *_mean_and_highest(below))
        rows.append((f"{inputs} {problem}", str(readings), *cells))
    columns = ("readings", "all", "near", "mean %", "highest %", "below", "mean %", "highest %")
    note = (
        f"Readings from task {FIRST} on whose value is within {NEAR:.0%} of that of constant "
        "outputs (1 - sum p^2 of equal shares: 0.9 of ten classes, 0.5 of two), and below that: "
        "how many, and the mean and highest accuracy on the task that was just learned."
    )
    title = "Accuracy where the value is that of constant outputs"
    return Sheet("at-constant", title, columns, rows, (note,))


def half_sheet(runs: Sequence[Course], measures: Mapping[str, str] = INPUTS) -> Sheet:
    """In how many runs accuracy has fallen where the value fell below a half.

    Args:
        runs: all of them.
        measures: names of inputs in the table, and of the measures on them.
    """
    rows = []
    for inputs, problem, of_it in _groups(runs, measures):
        fallen = [
            run for run in of_it if _moved(ends(run.measures[measures[inputs]])) < np.log(0.5)
        ]
        lost = sum(_falls(ends(run.accuracy)) for run in fallen)
        missed = sum(run.loss is not None for run in of_it if run not in fallen)
        rows.append((f"{inputs} {problem}", *map(str, (len(of_it), len(fallen), lost, missed))))
    columns = ("runs", "all", "below half", "accuracy fell", "lost elsewhere")
    note = (
        "Runs in which the last fifth of the readings is below half of the first (geometric "
        "means); those of them whose accuracy fell from the first to the last fifth; and losses of "
        "plasticity in the other runs."
    )
    return Sheet("below-half", "Values that fell below a half", columns, rows, (note,))


def onset_sheet(runs: Sequence[Course]) -> Sheet:
    """How the value has moved ahead of a loss."""
    rows = []
    for inputs, problem, of_it in _groups(runs):
        known = [_change_before_onset(run, INPUTS[inputs]) for run in of_it]
        changes = [change for change in known if change is not None]
        if not changes:
            continue
        rose = sum(change > 0 for change in changes)
        factor = f"{np.exp(np.mean(changes)):.2f}"
        rows.append((f"{inputs} {problem}", str(len(changes)), str(rose), factor))
    note = (
        f"Mean of the value {BEFORE} to {LEAD} tasks before the onset of a loss, beside its median "
        f"over tasks {REFERENCE.start} to {REFERENCE.stop - 1}: in how many losses it was higher, "
        "and the geometric mean of the ratio."
    )
    columns = ("values before an onset", "losses", "rose", "factor")
    return Sheet("before-onset", "Values before a loss", columns, rows, (note,))


def _groups(
    runs: Sequence[Course], measures: Iterable[str] = INPUTS
) -> Iterator[tuple[str, str, list[Course]]]:
    """Yield inputs, problem and its runs, all problems together last."""
    problems = list(dict.fromkeys(run.problem for run in runs))
    for inputs in measures:
        for problem in problems:
            yield inputs, problem, [run for run in runs if run.problem == problem]
        yield inputs, ALL_PROBLEMS, list(runs)


def _accuracies(run: Course, measure: str, where: Callable[[Array], Flags]) -> Array:
    """Return the accuracies on the tasks after which a measure's value is somewhere."""
    constant = 0.5 if run.problem == IMAGES else 0.9
    chosen = (run.read_at >= FIRST) & where(run.measures[measure] / constant)
    return run.accuracy[run.read_at[chosen]]


def _is_near(ratio: Array) -> Flags:
    return abs(ratio - 1) < NEAR


def _is_below(ratio: Array) -> Flags:
    return ratio <= 1 - NEAR


def _mean_and_highest(accuracies: Array) -> tuple[str, str, str]:
    if not len(accuracies):
        return "0", DASH, DASH
    mean, highest = 100 * accuracies.mean(), 100 * accuracies.max()
    return str(len(accuracies)), f"{mean:.1f}", f"{highest:.1f}"


def _falls(parts: tuple[Array, Array]) -> bool:
    first, last = parts
    return bool(last.mean() < first.mean())


def _moved(parts: tuple[Array, Array]) -> float:
    """Return the logarithm of the ratio of the last to the first part, by geometric means."""
    first, last = (np.log(np.maximum(part, 1e-12)).mean() for part in parts)
    return float(last - first)


def _change_before_onset(run: Course, measure: str) -> float | None:
    """Return the logarithm of the ratio of the values ahead of a loss to those of the reference.

    None where nothing is lost, or too early to have readings between.
    """
    if run.loss is None:
        return None
    onset, at, values = run.loss.onset, run.read_at, run.measures[measure]
    ahead = values[(at >= max(onset - BEFORE, FIRST)) & (at <= onset - LEAD)]
    reference = values[(at >= REFERENCE.start) & (at < REFERENCE.stop)]
    if not len(ahead):
        return None
    return float(np.log(ahead).mean() - np.log(np.median(reference)))
