"""Charts of an estimate, and of a training's readings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastlr.display.figures import (
    COLOURS,
    INK,
    MUTED,
    count_axis,
    error_band,
    log_axis,
    new_figure,
    save_figure,
    style,
    title_of_all,
)
from fastlr.display.tables import group_to_fit, pm
from fastlr.display.trend import Measurement
from fastlr.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def per_layer_figure(
    estimates: Any, *, title: str = "Local redundancy by layer, in network order", most: int = 48
) -> Any:
    """Draw each module's share of the mean squared gradient norm, top to bottom in network order.

    The shares of the parameters of a module are added up; where that gives more than ``most`` bars,
    modules are joined into the blocks that hold them. The axis is linear: bars can be compared and
    add up to 100 %.

    Args:
        estimates: A :class:`fastlr.Estimate`, whose shares are ``per_parameter`` over their sum; or
            a dict from names to estimates of the same parameters, which are drawn side by side,
            each on its own axis.
        title: The line above the chart.
        most: The largest number of bars.

    Returns:
        The matplotlib figure, which notebooks show.

    Raises:
        InputError: Nothing to show (no parameters or all values zero), or different parameters.
    """
    panels = estimates if isinstance(estimates, dict) else {"": estimates}
    if len({tuple(estimate.per_parameter) for estimate in panels.values()}) != 1:
        raise InputError(
            "the estimates are of different parameters, so their bars cannot stand side by side"
        )
    if any(not sum(estimate.per_parameter.values()) > 0 for estimate in panels.values()):
        raise InputError("an estimate is zero or has no parameters: there are no shares to draw")
    groups = [group_to_fit(estimate.per_parameter, most) for estimate in panels.values()]
    names = list(groups[0])

    size = (3.2 + 4.4 * len(panels), 1.7 + 0.2 * len(names))
    figure, grid = new_figure(size, 1, len(panels), sharey=True, squeeze=False)
    row = grid[0]
    for axes, (name, estimate), group, colour in zip(
        row, panels.items(), groups, COLOURS * len(panels)
    ):
        total = sum(group.values())
        _bars(axes, [value / total for value in group.values()], colour)
        result = f"{pm(estimate.value, estimate.stderr)}, n = {estimate.n}"
        axes.set_title(f"{name}: {result}" if name else result, loc="left", fontsize=9, color=INK)
    row[0].set_yticks(range(len(names)), names, fontsize=8, color=INK)
    row[0].set_ylim(len(names) - 0.4, -0.6)
    title_of_all(figure, title, fontsize=11)
    text = "share of the local redundancy (mean squared per-sample gradient norm)"
    figure.supxlabel(text, fontsize=9, color=INK)
    return figure


def per_layer_chart(estimates: Any, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write the figure of `per_layer_figure` to ``path``: ``.png``, ``.pdf`` or ``.svg``.

    Returns the path with its suffix.

    ``options`` are those of `per_layer_figure`.

    Raises:
        InputError: As there, or an unwritable path.
    """
    return save_figure(per_layer_figure(estimates, **options), path)


def course_figure(readings: Sequence[Measurement]) -> Figure:
    """Draw local redundancy over a training, with a band of two standard errors.

    Raises:
        InputError: There is no reading.
    """
    if not readings:
        raise InputError("there is no reading to draw yet: measure first")
    has_steps = any(reading.step for reading in readings)
    x = np.array([reading.step if has_steps else reading.epoch for reading in readings])
    values, errors = np.array([reading[:2] for reading in readings]).T
    figure, axes = new_figure((7, 3.2), 1)
    axes.plot(x, values, color=COLOURS[0], marker="o", markersize=3, linewidth=1.4)
    error_band(axes, x, values, errors, COLOURS[0])
    style(axes, "local redundancy", "Local redundancy, +- 2 standard errors")
    count_axis(axes, "optimizer steps" if has_steps else "epochs")
    if (values > 0).all() and values.max() > 20 * values.min():
        log_axis(axes)
    return figure


def _bars(axes: Any, shares: list[float], colour: str) -> None:
    """Draw one panel: a bar a row with its percentage, no frame, light vertical lines."""
    from matplotlib.ticker import PercentFormatter

    largest = max(shares)
    bars = axes.barh(range(len(shares)), shares, height=0.78, color=colour)
    texts = [_percent(share) for share in shares]
    axes.bar_label(bars, texts, padding=3, fontsize=7, color=MUTED)
    axes.set_xlim(0, 1.12 * largest)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if largest > 0.1 else 1))
    style(axes, "", grid="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _percent(share: float) -> str:
    """Return a share as the text of its bar; none where it would be 0.0."""
    return f"{100 * share:.1f}" if share >= 0.0005 else ""
