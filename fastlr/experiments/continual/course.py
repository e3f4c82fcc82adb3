"""How redundancy and accuracy went over runs of several interventions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from fastlr.display.sheets import DASH, Sheet
from fastlr.experiments.continual.findings import brief, ends
from fastlr.experiments.continual.options import COMPARED, ContinualOptions
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.continual.tables import hundred, label, order
from fastlr.experiments.runs.records import Array, as_dict, finite, number

_REDUNDANCY = "local_redundancy"  # and its kinds, whose names begin with it


def by_intervention(runs: Sequence[ContinualRun]) -> dict[str, list[ContinualRun]]:
    """Group runs by the options of their interventions, those with the fewest options first.

    The groups are named by their folders if these differ, else by their options.
    """
    defaults = {key: getattr(ContinualOptions(), key) for key in COMPARED}
    settings = [{key: run.options.get(key, defaults[key]) for key in defaults} for run in runs]
    varying = [key for key in defaults if any(s[key] != settings[0][key] for s in settings)]
    groups: dict[str, list[ContinualRun]] = {}
    changes: dict[str, dict[str, object]] = {}
    for run, setting in zip(runs, settings):
        changed = {key: setting[key] for key in varying if setting[key] != defaults[key]}
        group = json.dumps(changed, sort_keys=True)
        changes[group] = dict(sorted(changed.items()))
        groups.setdefault(group, []).append(run)
    fewest_first = sorted(groups, key=lambda group: len(changes[group]))
    names = _folder_names([groups[group] for group in fewest_first])
    if names is None:
        told = (changes[group].items() for group in fewest_first)
        names = [", ".join(f"{key}={value}" for key, value in items) for items in told]
    return {name or "none": groups[group] for name, group in zip(names, fewest_first)}


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
    names = [name for group in groups.values() for run in group for name in run.measures]
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
    slug, title = f"course{measure.removeprefix(_REDUNDANCY)}", f"Over the run: {label(measure)}"
    return Sheet(slug, title, columns, tuple(rows), (note,))


def _accuracy_of_fifth(runs: Sequence[ContinualRun], end: int) -> float:
    """Return the mean over runs of the accuracy in the first (``end`` 0) or last fifth (1)."""
    return mean_of_known([mean_of_known(ends(run.accuracy)[end]) for run in runs])


def _mean_logarithms(run: ContinualRun, measure: str) -> list[float]:
    """Return the mean logarithms of a measure: untrained, in the first and in the last fifth.

    They are NaN where it was not measured.
    """
    start = np.array([number(as_dict(run.start, measure).get("value"))])
    parts = (start, *ends(run.measure(measure)))
    return [mean_of_known(np.log(part[part > 0])) for part in parts]


def _factor_between_seeds(logs: Array) -> str:
    """Write the standard deviation of logarithms over seeds as a factor."""
    known = finite(logs)
    return f"x {math.exp(known.std(ddof=1)):.2f}" if len(known) > 1 else DASH


def mean_of_known(values: ArrayLike) -> float:
    """Return the mean of those that are finite; NaN if none is."""
    known = finite(values)
    return float(known.mean()) if len(known) else math.nan


def geometric(logs: ArrayLike) -> str:
    """Write the geometric mean of values whose logarithms are given."""
    mean = mean_of_known(logs)
    return brief(math.exp(mean)) if math.isfinite(mean) else DASH
