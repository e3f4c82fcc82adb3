"""What a measure adds to the prediction of later accuracy, on the problems of the study.

Against what costs nothing: the number of the task, the mean accuracy of the last ten tasks, and
accuracy after the first epoch. Once on all tasks, once on those before the onset of a loss alone:
that a network which is dead stays dead is no prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.alarm.analysis import MEASURES
from bench.alarm.losses import Array
from bench.alarm.signals import Course
from fastlr.display.sheets import DASH, Sheet
from fastlr.experiments.continual.fields import LEARNING_SPEED
from fastlr.experiments.continual.prediction import (
    HORIZON,
    Prediction,
    Series,
    in_logarithms,
    predict,
    recent_mean,
)

ADDED = {name: of_run[0] for name, of_run in MEASURES.items() if of_run[0] != LEARNING_SPEED}


def series_of(course: Course, values: Array, stop: int) -> Series:
    """Return the tasks of a run before ``stop``; those at which nothing was read are NaN.

    Args:
        course: the run.
        values: of the measure, at the tasks ``course.read_at``.
        stop: number of tasks.
    """
    accuracy = course.accuracy[:stop]
    target = np.full(stop, np.nan)
    for task in range(stop - HORIZON):
        target[task] = accuracy[task + 1 : task + 1 + HORIZON].mean()

    def at_tasks(read: Array) -> Array:
        placed = np.full(len(course.accuracy), np.nan)
        placed[course.read_at] = read
        return placed[:stop]

    speed = at_tasks(course.measures[LEARNING_SPEED])
    base = np.column_stack([recent_mean(accuracy), speed])
    return Series((course.problem, course.seed), target, base, at_tasks(values))


def predictions(runs: Sequence[Course], before_onset: bool, resamples: int) -> list[Prediction]:
    """Predict the accuracy of the next ten tasks with and without each measure, on one problem."""
    found = []
    for name, field in ADDED.items():
        measured = in_logarithms([run.measures[field] for run in runs])
        series = []
        for run, values in zip(runs, measured, strict=True):
            ends = before_onset and run.loss is not None
            stop = run.loss.onset if ends and run.loss else len(run.accuracy)
            series.append(series_of(run, values, stop))
        prediction = predict(name, series, resamples, seed=0)
        if prediction is not None:
            found.append(prediction)
    return found


def prediction_sheet(
    runs: Sequence[Course], problems: Sequence[str], before_onset: bool, resamples: int
) -> Sheet:
    """Write what each measure adds, by problem, in points of R^2 times 100."""
    columns = []
    for problem in problems:
        of_it = [run for run in runs if run.problem == problem]
        columns.append(column(predictions(of_it, before_onset, resamples)))
    names = ["without", *ADDED]
    rows = list(zip(names, *columns, strict=True))
    slug = "prediction-before-onset" if before_onset else "prediction"
    of_tasks = "tasks before the onset of a loss" if before_onset else "all tasks"
    note = (
        f"R^2 times 100 of the mean accuracy of the next {HORIZON} tasks. without: by the number "
        f"of the task (a line for each run), the mean accuracy of the last {HORIZON} tasks and "
        "accuracy after one epoch; below it what each measure adds (its logarithm where positive), "
        "with 95 % intervals by bootstrap of blocks of tasks. Out of sample: five blocks, each "
        f"predicted from the others, those within {HORIZON} tasks of it left out."
    )
    return Sheet(slug, f"Prediction out of sample: {of_tasks}", ("", *problems), rows, (note,))


def column(found: Sequence[Prediction]) -> list[str]:
    """Write R^2 without any measure, and what each measure adds."""
    by_name = {prediction.measure: prediction for prediction in found}
    without = f"{100 * found[0].base:.1f}" if found else DASH
    return [without, *(gain(by_name.get(name)) for name in ADDED)]


def gain(found: Prediction | None) -> str:
    """Write what a measure adds, with its interval."""
    if found is None:
        return DASH
    return f"{100 * found.gain:.2f} [{100 * found.low:.2f}, {100 * found.high:.2f}]"
