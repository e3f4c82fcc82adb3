"""How redundancy and accuracy went over runs of several interventions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fastlr.display.sheets import DASH, Sheet
from fastlr.display.tables import brief
from fastlr.experiments.continual.options import COMPARED, ContinualOptions
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.continual.tables import hundred, label, order
from fastlr.experiments.runs.records import (
    Array,
    all_measures,
    finite,
    grouped,
    mean_of_known,
    measured,
    number,
    told_by_all_but_differs,
)

_REDUNDANCY = "local_redundancy"  # and its kinds, whose names begin with it
PARTS = 5  # parts of a run, of which the first and the last are compared


def ends(values: Array) -> tuple[Array, Array]:
    """Return the first and the last fifth of a series."""
    part = max(1, len(values) // PARTS)
    return values[:part], values[-part:]


def by_intervention(runs: Sequence[ContinualRun]) -> dict[str, list[ContinualRun]]:
    """Group runs by the options of their interventions, those with the fewest options first.

    The groups are named by their folders if these differ, else by their options.
    """
    defaults = vars(ContinualOptions())
    settings = [{key: defaults[key] for key in COMPARED} | run.options for run in runs]
    varying = [key for key in sorted(COMPARED) if told_by_all_but_differs(key, settings)]
    changes = []  # of each run from the defaults
    for setting in settings:
        changed = {key: setting[key] for key in varying if setting[key] != defaults[key]}
        changes.append(json.dumps(changed, sort_keys=True))
    changed_groups = [(json.loads(text), group) for text, group in grouped(runs, changes)]
    changed_groups.sort(key=lambda group: len(group[0]))
    names = _folder_names([group for _, group in changed_groups])
    if names is None:
        names = [_in_words(changed) for changed, _ in changed_groups]
    return {name or "none": group for name, (_, group) in zip(names, changed_groups)}


def _in_words(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in changed.items())


def _folder_names(groups: Sequence[Sequence[ContinualRun]]) -> list[str] | None:
    """Return the name that the folders of each group share, seeds left out.

    None if the folders of a group have several names, or two groups have the same.
    """
    names: list[str] = []
    for group in groups:
        of_group = {re.sub(r"[,-]?seed-\d+$", "", run.path.name) for run in group}
        if len(of_group) > 1:
            return None
        names += of_group
    return names if len(set(names)) == len(groups) else None


def course_sheets(groups: Mapping[str, Sequence[ContinualRun]]) -> list[Sheet]:
    """Return tables of how local redundancy on each kind of inputs, and accuracy, changed.

    The columns are: untrained, in the first and in the last fifth.
    """
    names = all_measures(run for group in groups.values() for run in group)
    measured = order(name for name in names if name.startswith(_REDUNDANCY))
    return [_course_sheet(groups, name) for name in measured]


def _course_sheet(groups: Mapping[str, Sequence[ContinualRun]], measure: str) -> Sheet:
    """Return the table of one kind of inputs."""
    columns = ("intervention", "first %", "last %", "LR start", "LR first", "LR last", "seeds")
    rows = []
    for name, runs in groups.items():
        accuracy = [hundred(_accuracy_of_fifth(runs, end)) for end in (0, 1)]
        logs = np.array([_mean_logarithms(run, measure) for run in runs])  # [runs, 3]
        means = [geometric(of_time) for of_time in logs.T]
        rows.append((name, *accuracy, *means, _factor_between_seeds(logs[:, 2])))
    note = (
        "%: accuracy; first, last: fifth of the tasks; start: untrained. LR: geometric means over "
        "tasks and seeds. seeds: the factor by which those of the last fifth lie apart, exp of "
        "the standard deviation of their logarithms."
    )
    notes = (note, *_zeros(groups, measure))
    slug, title = f"course{measure.removeprefix(_REDUNDANCY)}", f"Over the run: {label(measure)}"
    return Sheet(slug, title, columns, rows, notes)


def _zeros(groups: Mapping[str, Sequence[ContinualRun]], measure: str) -> list[str]:
    """Say at how many readings a measure is not above zero, which have no logarithm."""
    zeros = []
    for name, runs in groups.items():
        values = np.concatenate([part for run in runs for part in ends(run.measure(measure))])
        if (values <= 0).any():
            zeros.append(f"{name} ({int((values <= 0).sum())} of {len(finite(values))})")
    if not zeros:
        return []
    return [f"Zero at readings of both fifths, which are left out of LR: {', '.join(zeros)}."]


def _accuracy_of_fifth(runs: Sequence[ContinualRun], end: int) -> float:
    """Return the mean over runs of the accuracy in the first (``end`` 0) or last fifth (1)."""
    return mean_of_known([mean_of_known(ends(run.accuracy)[end]) for run in runs])


def _mean_logarithms(run: ContinualRun, measure: str) -> list[float]:
    """Return the mean logarithms of a measure: untrained, in the first and in the last fifth.

    They are NaN where it was not measured.
    """
    start = np.array([number(measured(run.untrained, measure).get("value"))])
    parts = (start, *ends(run.measure(measure)))
    return [mean_of_known(np.log(part[part > 0])) for part in parts]


def _factor_between_seeds(logs: Array) -> str:
    """Write the standard deviation of logarithms over seeds as a factor."""
    known = finite(logs)
    return f"x {math.exp(known.std(ddof=1)):.2f}" if len(known) > 1 else DASH


def geometric(logs: ArrayLike) -> str:
    """Write the geometric mean of values whose logarithms are given."""
    mean = mean_of_known(logs)
    return brief(math.exp(mean)) if math.isfinite(mean) else DASH
