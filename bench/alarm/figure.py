"""The figure of the study: what an alarm finds in time, against how often it rings for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.alarm.analysis import ALL, BASELINE, INSTEAD, MEASURES, losing_problems
from bench.alarm.choices import LEAD, candidates, chosen, rates
from bench.alarm.signals import Course
from fastlr.display.figures import COLOURS, INK, legend_below, new_figure, style

ALLOWED = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0)  # false alarms in 100 tasks
DRAWN = (*MEASURES, *BASELINE, "number of the task", *INSTEAD)
LINES = ("-", "--", ":")


def found_against_false(runs: Sequence[Course]) -> Any:
    """Draw, for each measure, the mean over problems of what rules find and how often they err.

    A point is a rate of false alarms that rules may have on the other problems, by which they are
    chosen; what it shows is what they then do on the problem that was left out.
    """
    figure, axes = new_figure((8, 5.6), 1)
    for index, name in enumerate(DRAWN):
        false, found = np.array(points(runs, ALL[name])).T
        marker = "o" if name in INSTEAD else ""
        width = 2.5 if name in BASELINE else 1.4
        axes.plot(
            false,
            100 * found,
            color=COLOURS[index % len(COLOURS)],
            linestyle=LINES[index // len(COLOURS)],
            marker=marker,
            linewidth=width,
            label=name,
        )
    axes.set_xlabel("false alarms in 100 tasks, mean over the problems", color=INK, fontsize=9)
    title = "Rules chosen on the other problems, by how often they may err there"
    style(axes, f"losses found at least {LEAD} tasks ahead, %", title, grid="both")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 100)
    legend_below(figure, axes)
    return figure


def points(runs: Sequence[Course], names: Sequence[str]) -> list[tuple[float, float]]:
    """Return false alarms in 100 tasks and share found, for each rate that rules may have."""
    problems = list(dict.fromkeys(run.problem for run in runs))
    losing = losing_problems(runs)
    false = np.empty((len(problems), len(ALLOWED)))
    found = np.full((len(problems), len(ALLOWED)), np.nan)
    for row, problem in enumerate(problems):
        made = candidates(runs, names, problem, problems)
        ones = np.ones((1, len(made.problems)))
        here = rates(made, row, ones)
        for column, allowed in enumerate(ALLOWED):
            rule = chosen(made, row, len(problems), ones, allowed)[0]
            false[row, column] = here.false[0, rule]
            if problem in losing:
                found[row, column] = here.found[0, rule]
    return list(zip(np.nanmean(false, 0).tolist(), np.nanmean(found, 0).tolist()))
