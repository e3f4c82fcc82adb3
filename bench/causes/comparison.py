"""Late accuracy and late measures of runs that differ by intervention and by seed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastlr.errors import FastlrWarning
from fastlr.experiments.continual.course import by_intervention
from fastlr.experiments.continual.findings import ends
from fastlr.experiments.continual.records import ContinualRun
from fastlr.experiments.continual.tables import order
from fastlr.experiments.runs.records import Array, finite
from fastlr.experiments.statistics.seeds import Mean, mean_over_seeds

REDUNDANCY = "local_redundancy"


@dataclass(frozen=True)
class Comparison:
    """Late accuracy and late measures (means over the last fifth) of runs by intervention and seed.

    Arrays are ``[interventions, seeds]``, NaN where there is no such run.

    Attributes:
        groups: The runs of each intervention that are compared; the first, with the fewest options,
            is the control.
        accuracy: Its mean.
        measures: The mean of each, or of its logarithm where it is always positive (``logs``).
        logs: Names of the measures whose logarithms are taken.
        tasks: Of every run, what lies beyond is left out.
    """

    groups: dict[str, list[ContinualRun]]
    accuracy: Array
    measures: dict[str, Array]
    logs: frozenset[str]
    tasks: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the interventions."""
        return tuple(self.groups)

    def change(self, values: Array, intervention: int) -> Mean:
        """Return the mean over seeds of an intervention's effect on ``values``.

        The effect is the difference from the control of the same seed; NaN if no seed has both.
        """
        effects = finite(values[intervention] - values[0])
        if not len(effects):
            return Mean(math.nan, math.nan, math.nan, math.nan, 0)
        return mean_over_seeds(effects.tolist())


def compare(runs: Sequence[ContinualRun]) -> Comparison:
    """Take the late accuracy and measures of runs of several interventions.

    A run with less than 9/10 of the longest run's tasks is left out, with a warning.
    """
    used = _long_enough(runs)
    groups, tasks = by_intervention(used), min(map(len, used))
    seeds = sorted({_seed(run) for run in used})
    measures = order(name for run in used for name in run.measures)
    logs = frozenset(name for name in measures if _always_positive(used, name, tasks))
    late = {name: np.full((len(groups), len(seeds)), np.nan) for name in ("accuracy", *measures)}
    for row, group in enumerate(groups.values()):
        for run in group:
            column = seeds.index(_seed(run))
            for name, table in late.items():
                values = _late(run, name, tasks)
                if len(values):
                    table[row, column] = (np.log(values) if name in logs else values).mean()
    return Comparison(groups, late.pop("accuracy"), late, logs, tasks)


def _long_enough(runs: Sequence[ContinualRun]) -> list[ContinualRun]:
    """Return the runs with at least 9/10 of the longest run's tasks; warn of the others."""
    longest = max(map(len, runs))
    used = [run for run in runs if 10 * len(run) >= 9 * longest]
    if len(used) < len(runs):
        text = (
            f"{len(runs) - len(used)} of {len(runs)} runs have less than 9/10 of {longest} tasks "
            "and are left out"
        )
        warnings.warn(text, FastlrWarning, stacklevel=3)
    return used


def _seed(run: ContinualRun) -> int:
    return run.options.get("seed", 0)


def _always_positive(runs: Sequence[ContinualRun], measure: str, tasks: int) -> bool:
    """Tell if no run has a late value of the measure that has no logarithm."""
    return all((_late(run, measure, tasks) > 0).all() for run in runs)


def _late(run: ContinualRun, name: str, tasks: int) -> Array:
    """Return the finite values of accuracy or a measure in the last fifth of the tasks."""
    series = run.accuracy if name == "accuracy" else run.measure(name)
    return finite(ends(series[:tasks])[1])
