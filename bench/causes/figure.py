"""Late accuracy over late local redundancy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bench.causes.comparison import REDUNDANCY, Comparison
from fastlr.display.figures import COLOURS, INK, MUTED, legend_below, new_figure, style
from fastlr.experiments.runs.records import mean_of_known


def scatter(found: Comparison) -> Any:
    """Draw late accuracy over late local redundancy; return None if there is nothing to draw.

    Small markers are runs, large ones the mean of an intervention.
    """
    if REDUNDANCY not in found.logs:
        return None
    figure, axes = new_figure((8, 5.4), 1)
    for i, name in enumerate(found.names):
        logs, accuracy = found.measures[REDUNDANCY][i], 100 * found.accuracy[i]
        colour, marker = COLOURS[i % len(COLOURS)], "osD^v"[i // len(COLOURS) % 5]
        look = {"color": colour, "marker": marker, "linestyle": ""}
        axes.plot(np.exp(logs), accuracy, markersize=3, alpha=0.5, **look)
        middle = math.exp(mean_of_known(logs)), mean_of_known(accuracy)
        axes.plot(*[[at] for at in middle], markersize=9, markeredgecolor=INK, label=name, **look)
    axes.set_xscale("log")
    axes.set_xlabel("late local redundancy, E||grad||²", color=INK, fontsize=9)
    title = f"Last fifth of {found.tasks} tasks; small: a run, large: mean over seeds"
    style(axes, "late accuracy, %", title, grid="both")
    axes.tick_params(which="both", labelsize=8, colors=MUTED)
    legend_below(figure, axes)
    return figure
